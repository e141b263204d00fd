// A stand-in for CANN's header of the same name: types that MindSpore's headers name.
#ifndef EMULATED_CANN_ACL_ACL_RT_ALLOCATOR_H_
#define EMULATED_CANN_ACL_ACL_RT_ALLOCATOR_H_

#include "acl/acl_base.h"

typedef void *aclrtAllocator;
typedef void *aclrtAllocatorAddr;
typedef void *aclrtAllocatorBlock;
typedef void *aclrtAllocatorDesc;
typedef aclrtAllocatorBlock (*aclrtAllocatorAllocFunc)(aclrtAllocator allocator, size_t bytes);
typedef aclrtAllocatorBlock (*aclrtAllocatorAllocAdviseFunc)(aclrtAllocator allocator, size_t bytes,
                                                             aclrtAllocatorAddr address);
typedef void (*aclrtAllocatorFreeFunc)(aclrtAllocator allocator, aclrtAllocatorBlock block);
typedef aclrtAllocatorAddr (*aclrtAllocatorGetAddrFromBlockFunc)(aclrtAllocatorBlock block);

#endif
