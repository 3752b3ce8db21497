// The C interface of fxpar's native core: plain C types only, so that ctypes can call it and no Python or
// torch version is built in. Every function is thread-safe unless it says otherwise.
#pragma once

#include <cstdint>

#define FXPAR_API extern "C" __attribute__((visibility("default")))

// One block of Philox4x32-10: encrypts `counter` under `key` into four uniform 32-bit words.
FXPAR_API void fxpar_philox_block(uint32_t out[4], const uint32_t counter[4], const uint32_t key[2]);

// Fills `out`, a contiguous row-major box of `ndim` dims with the given `sizes`, with uniform numbers in
// [0, 1). The element at local index i gets the number that belongs to the logical index
// offset + sum_d i[d] * strides[d], whatever box it is drawn in: word (index % 4) of the Philox block with
// key `seed` and counter (index / 4 as two words, op, step). Returns 0, or -1 with `out` untouched where a
// size is negative or some element's logical index is not in [0, 2^63).
FXPAR_API int fxpar_philox_uniform(float* out, uint64_t seed, uint32_t step, uint32_t op, int ndim,
                                   const int64_t* sizes, const int64_t* strides, int64_t offset);
