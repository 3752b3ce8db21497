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

// out[i] = the sum of terms[t][i] over t from 0 to `num_terms` - 1, in this order, for every i below `count`.
// `num_terms` is 1 or more; `out` may be one of the terms, and overlaps no other.
FXPAR_API void fxpar_sum(float* out, const float* const* terms, int64_t num_terms, int64_t count);

// fxpar_memory_file returns a descriptor, closed on exec, of a new empty file in memory; `name` only appears in /proc.
// fxpar_process_file returns a descriptor of the process `pid`, readable once that has ended. Both return a negative
// errno value if the kernel fails.
FXPAR_API int fxpar_memory_file(const char* name);
FXPAR_API int fxpar_process_file(int pid);

// The memory that ranks of one host share; on Linux only.
//
// A signal is 16 bytes, aligned to 8, in memory that may be shared between processes; all zero, it has value 0. Its
// value only grows. Setting it is a release, reading it an acquire.
FXPAR_API void fxpar_signal_set(void* signal, uint64_t value);
FXPAR_API uint64_t fxpar_signal_value(void* signal);

// Sleeps until the value is `at_least` or more: returns 1, or 0 after `timeout_ns`, or earlier if the process received
// a POSIX signal. The memory must stay a signal until every wait on it has returned.
FXPAR_API int fxpar_signal_wait(void* signal, uint64_t at_least, int64_t timeout_ns);

// A heap over the sparse file `fd` of `capacity` bytes, which the caller still owns: it allocates offsets, and commits
// the file's pages as it grows, never releasing any. Destroying it only frees its own records.
FXPAR_API void* fxpar_heap_create(int fd, uint64_t capacity);
FXPAR_API void fxpar_heap_destroy(void* heap);

// Returns the offset of a new block of `num_bytes`, uninitialised, aligned to 64 and never 0. On failure nothing is
// changed: returns -EAGAIN if no free block fits and it may not grow, -ENOSPC beyond its capacity, and other negative
// errno values if the kernel has no memory.
FXPAR_API int64_t fxpar_heap_allocate(void* heap, uint64_t num_bytes, int may_grow);

// Returns 0, or -1 where no block begins at `offset`.
FXPAR_API int fxpar_heap_free(void* heap, uint64_t offset);

// The committed bytes, and the bytes in allocated blocks.
FXPAR_API void fxpar_heap_usage(void* heap, uint64_t* committed, uint64_t* in_use);

// Cross-mesh resharding: which host sends each flow, and when.
//
// Flow i sends num_bytes[i] from any one of its senders to all of its receivers, a chain of hosts in that order. Its
// senders are senders[begin] to senders[end - 1], with begin = sender_ends[i - 1] (0 for i = 0) and end =
// sender_ends[i]; its receivers likewise. Hosts count from 0.
struct FxparFlows {
  int32_t num_hosts;
  int32_t num_flows;
  const int64_t* num_bytes;
  const int32_t* sender_ends;
  const int32_t* senders;
  const int32_t* receiver_ends;
  const int32_t* receivers;
};

enum FxparSearch {
  FXPAR_SEARCH_NAIVE,
  FXPAR_SEARCH_BALANCE,
  FXPAR_SEARCH_DEPTH_FIRST,
  FXPAR_SEARCH_GREEDY,
  FXPAR_SEARCH_BEST,
};

// Finds the sender and the start time of every flow; times are in bytes at the rate of a host's interface. A flow
// occupies the sending interface of its sender, the receiving ones of all receivers, and the sending ones of all
// receivers but the last, for as long as its bytes take; no two flows occupy an interface at the same time. A flow
// without bytes or without receivers starts at 0 and takes no time. The result depends on the arguments only, not on
// the time that the search takes. Returns 0, or -1 with the outputs untouched if `search` is not in FxparSearch, a flow
// has no sender, a host is out of range or occurs twice among the senders and receivers of a flow, a number of bytes is
// negative, or the bytes of all flows times num_hosts exceed 2^50.
FXPAR_API int fxpar_reshard_search(const struct FxparFlows* flows, int search, uint64_t seed, int32_t* senders,
                                   int64_t* starts);

// Sets `bound` to numerator and denominator of a lower bound of the makespan of any transfers, in the same unit: the
// most that one host must receive, or that a set of hosts must send, divided by the size of the set. Returns as
// fxpar_reshard_search.
FXPAR_API int fxpar_reshard_bound(const struct FxparFlows* flows, int64_t bound[2]);
