// A stand-in for CANN's header of the same name: devices, contexts, streams, events and memory.
#ifndef EMULATED_CANN_ACL_ACL_RT_H_
#define EMULATED_CANN_ACL_ACL_RT_H_

#include "acl/acl_base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
  ACL_MEM_MALLOC_HUGE_FIRST = 0,
  ACL_MEM_MALLOC_HUGE_ONLY = 1,
  ACL_MEM_MALLOC_NORMAL_ONLY = 2
} aclrtMemMallocPolicy;

typedef enum {
  ACL_MEMCPY_HOST_TO_HOST = 0,
  ACL_MEMCPY_HOST_TO_DEVICE = 1,
  ACL_MEMCPY_DEVICE_TO_HOST = 2,
  ACL_MEMCPY_DEVICE_TO_DEVICE = 3
} aclrtMemcpyKind;

typedef enum { ACL_DEVICE = 0, ACL_HOST = 1 } aclrtRunMode;
typedef enum { ACL_DDR_MEM = 0, ACL_HBM_MEM = 1 } aclrtMemAttr;
typedef enum { ACL_EVENT_RECORDED_STATUS_NOT_READY = 0, ACL_EVENT_RECORDED_STATUS_COMPLETE = 1 } aclrtEventRecordedStatus;
typedef enum { ACL_STREAM_STATUS_COMPLETE = 0, ACL_STREAM_STATUS_NOT_READY = 1 } aclrtStreamStatus;
typedef enum { ACL_CALLBACK_NO_BLOCK = 0, ACL_CALLBACK_BLOCK = 1 } aclrtCallbackBlockType;
typedef void (*aclrtCallback)(void *user_data);

// Named by MindSpore's headers, and otherwise unused here.
typedef void *aclrtDrvMemHandle;
typedef struct aclrtExceptionInfo aclrtExceptionInfo;
typedef struct aclrtMemUceInfo aclrtMemUceInfo;
typedef struct aclrtPhysicalMemProp aclrtPhysicalMemProp;
typedef void (*aclrtExceptionInfoCallback)(aclrtExceptionInfo *info);
typedef enum { ACL_RT_OVERFLOW_MODE_SATURATION = 0, ACL_RT_OVERFLOW_MODE_INFNAN = 1 } aclrtFloatOverflowMode;
typedef enum { ACL_OPT_DETERMINISTIC = 0 } aclSysParamOpt;
typedef enum { ACL_MEM_HANDLE_TYPE_NONE = 0 } aclrtMemHandleType;
typedef enum { ACL_RT_THREAD_LEVEL = 0 } aclrtLastErrLevel;

aclError aclInit(const char *config_path);
aclError aclFinalize();
const char *aclGetRecentErrMsg();
const char *aclrtGetSocName();

aclError aclrtGetDeviceCount(uint32_t *count);
aclError aclrtSetDevice(int32_t device);
aclError aclrtResetDevice(int32_t device);
aclError aclrtGetDevice(int32_t *device);
aclError aclrtCreateContext(aclrtContext *context, int32_t device);
aclError aclrtDestroyContext(aclrtContext context);
aclError aclrtSetCurrentContext(aclrtContext context);
aclError aclrtGetCurrentContext(aclrtContext *context);
aclError aclrtGetRunMode(aclrtRunMode *mode);
aclError aclrtSynchronizeDevice();
aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout_ms);

aclError aclrtCreateStream(aclrtStream *stream);
aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t priority, uint32_t flag);
aclError aclrtDestroyStream(aclrtStream stream);
aclError aclrtDestroyStreamForce(aclrtStream stream);
aclError aclrtSynchronizeStream(aclrtStream stream);
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout_ms);
aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus *status);
aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event);
aclError aclrtLaunchCallback(aclrtCallback function, void *user_data, aclrtCallbackBlockType block, aclrtStream stream);

aclError aclrtCreateEvent(aclrtEvent *event);
aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t flag);
aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t flag);
aclError aclrtDestroyEvent(aclrtEvent event);
aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream);
aclError aclrtResetEvent(aclrtEvent event, aclrtStream stream);
aclError aclrtSynchronizeEvent(aclrtEvent event);
aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status);
aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent start, aclrtEvent end);
aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t *microseconds);

aclError aclrtMalloc(void **address, size_t bytes, aclrtMemMallocPolicy policy);
aclError aclrtFree(void *address);
aclError aclrtMallocHost(void **address, size_t bytes);
aclError aclrtFreeHost(void *address);
aclError aclrtGetMemInfo(aclrtMemAttr attribute, size_t *free_bytes, size_t *total_bytes);
aclError aclrtMemcpy(void *dst, size_t dst_max, const void *src, size_t count, aclrtMemcpyKind kind);
aclError aclrtMemcpyAsync(void *dst, size_t dst_max, const void *src, size_t count, aclrtMemcpyKind kind,
                          aclrtStream stream);
aclError aclrtMemset(void *address, size_t max_bytes, int32_t value, size_t count);
aclError aclrtMemsetAsync(void *address, size_t max_bytes, int32_t value, size_t count, aclrtStream stream);

#ifdef __cplusplus
}
#endif
#endif
