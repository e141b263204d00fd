// A stand-in for CANN's header of the same name: the opaque handles of the two-phase operators.
#ifndef EMULATED_CANN_ACLNN_ACL_META_H_
#define EMULATED_CANN_ACLNN_ACL_META_H_

#include <stdbool.h>

#include "acl/acl_base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef int32_t aclnnStatus;
typedef struct aclOpExecutor aclOpExecutor;
typedef struct aclTensor aclTensor;
typedef struct aclScalar aclScalar;
typedef struct aclIntArray aclIntArray;
typedef struct aclFloatArray aclFloatArray;
typedef struct aclBoolArray aclBoolArray;
typedef struct aclTensorList aclTensorList;

aclTensor *aclCreateTensor(const int64_t *view_dims, uint64_t view_dims_num, aclDataType dtype, const int64_t *stride,
                           int64_t offset, aclFormat format, const int64_t *storage_dims, uint64_t storage_dims_num,
                           void *data);
aclScalar *aclCreateScalar(void *value, aclDataType dtype);
aclIntArray *aclCreateIntArray(const int64_t *value, uint64_t size);
aclFloatArray *aclCreateFloatArray(const float *value, uint64_t size);
aclBoolArray *aclCreateBoolArray(const bool *value, uint64_t size);
aclTensorList *aclCreateTensorList(const aclTensor *const *value, uint64_t size);

aclnnStatus aclDestroyTensor(const aclTensor *tensor);
aclnnStatus aclDestroyScalar(const aclScalar *scalar);
aclnnStatus aclDestroyIntArray(const aclIntArray *array);
aclnnStatus aclDestroyFloatArray(const aclFloatArray *array);
aclnnStatus aclDestroyBoolArray(const aclBoolArray *array);
aclnnStatus aclDestroyTensorList(const aclTensorList *list);

// The shape comes in an array made with new[], which the caller deletes.
aclnnStatus aclGetViewShape(const aclTensor *tensor, int64_t **view_dims, uint64_t *view_dims_num);

aclnnStatus aclSetAclOpExecutorRepeatable(aclOpExecutor *executor);
aclnnStatus aclDestroyAclOpExecutor(aclOpExecutor *executor);
aclnnStatus aclSetTensorAddr(aclOpExecutor *executor, const size_t index, aclTensor *tensor, void *address);
aclnnStatus aclSetDynamicTensorAddr(aclOpExecutor *executor, const size_t index, const size_t relative_index,
                                    aclTensorList *tensors, void *address);

#ifdef __cplusplus
}
#endif
#endif
