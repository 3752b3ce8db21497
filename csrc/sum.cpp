// Sums of many arrays of floats of equal size, in one pass over memory.
#include <algorithm>

#include "fxpar.h"

namespace {

constexpr int64_t kBlock = 1024;  // floats: their sum stays in the L1 cache while the terms are read

void sum_block(float* out, const float* const* terms, int64_t num_terms, int64_t begin, int64_t count) {
  float sum[kBlock];
  std::copy_n(terms[0] + begin, count, sum);
  for (int64_t term = 1; term < num_terms; ++term) {
    const float* values = terms[term] + begin;
    for (int64_t i = 0; i < count; ++i) sum[i] += values[i];
  }
  std::copy_n(sum, count, out + begin);
}

}  // namespace

void fxpar_sum(float* out, const float* const* terms, int64_t num_terms, int64_t count) {
  for (int64_t begin = 0; begin < count; begin += kBlock)
    sum_block(out, terms, num_terms, begin, std::min(kBlock, count - begin));
}
