// A stand-in for CANN's header of the same name.
#ifndef EMULATED_CANN_ACLNN_ACLNN_BASE_H_
#define EMULATED_CANN_ACLNN_ACLNN_BASE_H_

#include "aclnn/acl_meta.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
  ACLNN_SUCCESS = 0,
  ACLNN_ERR_PARAM_NULLPTR = 161001,
  ACLNN_ERR_PARAM_INVALID = 161002,
  ACLNN_ERR_RUNTIME_ERROR = 361001,
  ACLNN_ERR_INNER = 561000,
  ACLNN_ERR_INNER_TILING_ERROR = 561002,
  ACLNN_ERR_INNER_FIND_KERNEL_ERROR = 561003,
  ACLNN_ERR_INNER_OPP_PATH_NOT_FOUND = 561107
};

aclnnStatus aclnnInit(const char *config_path);
aclnnStatus aclnnFinalize();

#ifdef __cplusplus
}
#endif
#endif
