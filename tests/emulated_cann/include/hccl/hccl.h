// A stand-in for CANN's header of the same name: names only, nothing of it is emulated.
#ifndef EMULATED_CANN_HCCL_HCCL_H_
#define EMULATED_CANN_HCCL_HCCL_H_

#include <stdint.h>

typedef void *HcclComm;

#endif
