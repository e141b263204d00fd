// A libascendcl.so whose runtime has moved to libacl_rt.so, and which a search must not take for whole.
#include "acl/acl_base.h"
#include "export.hpp"

EMU_API size_t aclDataTypeSize(aclDataType type) { return type == ACL_FLOAT16 ? 2 : 4; }
