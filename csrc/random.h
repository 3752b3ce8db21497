// Random numbers that are the same on every machine.
#pragma once

#include <cstdint>

namespace fxpar {

// SplitMix64 (Steele et al., "Fast Splittable Pseudorandom Number Generators").
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    uint64_t word = state_ += 0x9E3779B97F4A7C15;
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB;
    return word ^ (word >> 31);
  }

  // A number below `limit`, nearly uniform: the bias is at most limit / 2^64.
  int64_t below(int64_t limit) {
    return static_cast<int64_t>((static_cast<unsigned __int128>(next()) * static_cast<uint64_t>(limit)) >> 64);
  }

 private:
  uint64_t state_;
};

}  // namespace fxpar
