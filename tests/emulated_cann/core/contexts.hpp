// Initialisation, devices and contexts. A context is current in a thread, not in the process: a thread that set no
// device has none, whatever other threads did.
#pragma once

#include <cstdint>

namespace emu {

void initialise();
void finalise();
void require_initialised();

void set_device(int32_t device);
// Counted: as many resets as sets end the device's context, for every thread that uses it.
void reset_device(int32_t device);
int32_t current_device();

void *create_context(int32_t device);
void destroy_context(void *handle);
void set_current_context(void *handle);
void *current_context();

// Throws 107002 where the calling thread has no live context.
void require_context();

// For aclnn functions, which answer with codes of their own.
void require_runtime();

void reset_contexts();

}  // namespace emu
