// An operator library that has operators, but not aclnnAddLora: what a search must pass over.
#include "aclnn/acl_meta.h"
#include "export.hpp"

EMU_API aclnnStatus aclnnEmulatedOther() {
  return EMU_CALL.run([] {});
}
