// A stand-in for CANN's header of the same name: types that MindSpore's headers name.
#ifndef EMULATED_CANN_ACL_ACL_OP_H_
#define EMULATED_CANN_ACL_ACL_OP_H_

#include "acl/acl_base.h"

#endif
