// The gradients of the operator. With g the gradient of out, s its columns y_offset .. y_offset + H2, and rows i of
// adapter w in the layer of the call:
//
//     z[i]  = x[i] A[w]^T                dz[i] = s[i] B[w]
//     dx[i] = scale * dz[i] A[w]         (without weight_a: scale * dz[i])
//     dA[w] = scale * sum over i of dz[i]^T x[i]
//     dB[w] = scale * sum over i of s[i]^T z[i]
//
// and y's is g itself. Everything is summed in float32, the sums over rows in the order of the batch, and rounded once.
// Rows without an adapter have a zero dx and no part in dA and dB; what no row uses is zero, and its weights are not read.
#pragma once

#include "add_lora.hpp"

namespace addlora {

enum class Gradient { kX, kWeightA, kWeightB };

// forward.y is g, forward.out the gradient that is wanted: contiguous, of the shape of x, weight_a or weight_b. The
// problem has been checked as a forward call.
void compute_gradient(const Problem& forward, Gradient wanted);

}  // namespace addlora
