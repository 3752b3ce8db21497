// Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", section 3.3) over the logical
// indices of a tensor, so that every shard of it draws exactly the numbers that the whole tensor draws.
#include "fxpar.h"

#include <algorithm>
#include <vector>

namespace {

constexpr int kWords = 4;   // random words per block
constexpr int kLanes = 32;  // blocks encrypted in parallel; with 16, g++ 12 unrolls and no longer vectorizes
constexpr int kRounds = 10;

// Encrypts `lanes` counters at once in place; word-major, so that each round is `lanes` independent steps.
template <int lanes>
void encrypt(uint32_t (&words)[kWords][lanes], uint32_t key0, uint32_t key1) {
  for (int round = 0; round < kRounds; ++round) {
    for (int lane = 0; lane < lanes; ++lane) {
      const uint64_t product0 = uint64_t{0xD2511F53} * words[0][lane];
      const uint64_t product1 = uint64_t{0xCD9E8D57} * words[2][lane];
      words[0][lane] = static_cast<uint32_t>(product1 >> 32) ^ words[1][lane] ^ key0;
      words[1][lane] = static_cast<uint32_t>(product1);
      words[2][lane] = static_cast<uint32_t>(product0 >> 32) ^ words[3][lane] ^ key1;
      words[3][lane] = static_cast<uint32_t>(product0);
    }
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
}

// The upper 24 bits: exactly the multiples of 2^-24 in [0, 1), all of which a float can hold.
float to_uniform(uint32_t word) { return static_cast<float>(word >> 8) * 0x1p-24f; }

// The numbers of one random op in one step, by logical index.
class Stream {
 public:
  Stream(uint64_t seed, uint32_t step, uint32_t op) : seed_(seed), step_(step), op_(op) {}

  // The numbers of logical indices first_block * 4 .. (first_block + lanes) * 4.
  template <int lanes>
  void draw(int64_t first_block, float* out) const {
    uint32_t words[kWords][lanes];
    for (int lane = 0; lane < lanes; ++lane) {
      const uint64_t block = static_cast<uint64_t>(first_block) + lane;
      words[0][lane] = static_cast<uint32_t>(block);
      words[1][lane] = static_cast<uint32_t>(block >> 32);
      words[2][lane] = op_;
      words[3][lane] = step_;
    }
    encrypt(words, static_cast<uint32_t>(seed_), static_cast<uint32_t>(seed_ >> 32));
    for (int lane = 0; lane < lanes; ++lane)
      for (int word = 0; word < kWords; ++word) out[lane * kWords + word] = to_uniform(words[word][lane]);
  }

  // The numbers of logical indices begin, begin + stride, ...; a block is encrypted once for its neighbours.
  void draw_strided(float* out, int64_t size, int64_t begin, int64_t stride) const {
    float numbers[kWords];
    int64_t drawn_block = -1;
    for (int64_t i = 0; i < size; ++i) {
      const int64_t index = begin + i * stride;
      const int64_t block = index / kWords;
      if (block != drawn_block) draw<1>(block, numbers);
      drawn_block = block;
      out[i] = numbers[index % kWords];
    }
  }

  // The same for stride 1, whole blocks straight into `out`.
  void draw_contiguous(float* out, int64_t size, int64_t begin) const {
    const int64_t head = std::min(size, (kWords - begin % kWords) % kWords);
    draw_strided(out, head, begin, 1);
    int64_t done = head;
    for (; size - done >= kWords * kLanes; done += kWords * kLanes)
      draw<kLanes>((begin + done) / kWords, out + done);
    draw_strided(out + done, size - done, begin + done, 1);
  }

 private:
  uint64_t seed_;
  uint32_t step_;
  uint32_t op_;
};

struct Dim {
  int64_t size;
  int64_t stride;  // in logical elements
};

// Whether the least and the greatest logical index of a box are in [0, 2^63). The box has no empty dim.
bool is_addressable(const std::vector<Dim>& dims, int64_t offset) {
  int64_t least = offset, greatest = offset;
  for (const Dim& dim : dims) {
    int64_t span;
    if (dim.size < 0 || __builtin_mul_overflow(dim.size - 1, dim.stride, &span)) return false;
    int64_t& end = span < 0 ? least : greatest;
    if (__builtin_add_overflow(end, span, &end)) return false;
  }
  return least >= 0;
}

// The same box in as few dims as possible, but one at least: dims that together are evenly spaced are joined.
std::vector<Dim> join_dims(const std::vector<Dim>& dims) {
  std::vector<Dim> joined;
  for (const Dim& dim : dims) {
    if (dim.size == 1) continue;
    if (!joined.empty() && joined.back().stride == static_cast<__int128>(dim.size) * dim.stride)
      joined.back() = {joined.back().size * dim.size, dim.stride};
    else
      joined.push_back(dim);
  }
  if (joined.empty()) joined.push_back({1, 1});
  return joined;
}

// Fills the box of dims[depth..] whose first element has logical index `begin`; returns where `out` continues.
float* fill(float* out, const Stream& stream, const std::vector<Dim>& dims, size_t depth, int64_t begin) {
  const auto [size, stride] = dims[depth];
  if (depth + 1 < dims.size()) {
    for (int64_t i = 0; i < size; ++i) out = fill(out, stream, dims, depth + 1, begin + i * stride);
    return out;
  }
  if (stride == 1)
    stream.draw_contiguous(out, size, begin);
  else
    stream.draw_strided(out, size, begin, stride);
  return out + size;
}

}  // namespace

void fxpar_philox_block(uint32_t out[4], const uint32_t counter[4], const uint32_t key[2]) {
  uint32_t words[kWords][1] = {{counter[0]}, {counter[1]}, {counter[2]}, {counter[3]}};
  encrypt(words, key[0], key[1]);
  for (int word = 0; word < kWords; ++word) out[word] = words[word][0];
}

int fxpar_philox_uniform(float* out, uint64_t seed, uint32_t step, uint32_t op, int ndim,
                         const int64_t* sizes, const int64_t* strides, int64_t offset) {
  if (std::find(sizes, sizes + ndim, 0) != sizes + ndim) return 0;
  std::vector<Dim> dims;
  for (int d = 0; d < ndim; ++d) dims.push_back({sizes[d], strides[d]});
  if (!is_addressable(dims, offset)) return -1;
  fill(out, Stream(seed, step, op), join_dims(dims), 0, offset);
  return 0;
}
