// The NPU backend: numpy arrays are copied to the device, aclnnAddLora runs there, and the result is copied back.
#pragma once

#include "../backend.hpp"

namespace addlora {

const Backend& aclnn_backend();

}  // namespace addlora
