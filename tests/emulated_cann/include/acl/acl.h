// A stand-in for CANN's header of the same name.
#ifndef EMULATED_CANN_ACL_ACL_H_
#define EMULATED_CANN_ACL_ACL_H_

#include "acl/acl_base.h"
#include "acl/acl_rt.h"

#endif
