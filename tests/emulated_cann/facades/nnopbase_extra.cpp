// What MindSpore looks up beside the documented functions: memory that CANN would keep per thread, of which there is none.
#include "acl/acl_base.h"
#include "export.hpp"

EMU_API int InitHugeMemThreadLocal(void *, bool) { return ACL_SUCCESS; }
EMU_API void UnInitHugeMemThreadLocal(void *, bool) {}
EMU_API void ReleaseHugeMem(void *, bool) {}
