// Memory that the ranks of one host share: signals that a thread waits for asleep, and a heap of blocks.
#include "fxpar.h"

#ifdef __linux__  // elsewhere each rank is a host of its own, and none of this is called

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

struct Signal {
  std::atomic<uint64_t> value;
  std::atomic<uint32_t> events;   // how often it was set: the word by which the kernel sees that a waiter is late
  std::atomic<uint32_t> waiters;  // a waiter killed in its sleep stays counted; that costs wakes in vain, no more
};
static_assert(sizeof(Signal) == 16 && std::atomic<uint64_t>::is_always_lock_free, "the layout in fxpar.h");

Signal& as_signal(void* memory) { return *static_cast<Signal*>(memory); }

long futex(std::atomic<uint32_t>& word, int operation, uint32_t argument, const timespec* deadline) {
  return syscall(SYS_futex, &word, operation, argument, deadline, nullptr, FUTEX_BITSET_MATCH_ANY);
}

timespec after(int64_t time_ns) {
  constexpr int64_t kSecond = 1000000000;
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  const int64_t nanoseconds = time.tv_nsec + time_ns % kSecond;
  time.tv_sec += time_ns / kSecond + nanoseconds / kSecond;
  time.tv_nsec = nanoseconds % kSecond;
  return time;
}

// No set is missed: either `waiters` is seen by the set that would end the wait, which then wakes; or that set has
// counted its event before this reads `events`, and so its value is seen here; or it counts between that and the
// sleep, which the kernel then refuses.
bool sleep_until(Signal& signal, uint64_t at_least, const timespec& deadline) {
  for (;;) {
    const uint32_t seen = signal.events.load();
    if (signal.value.load(std::memory_order_acquire) >= at_least) return true;
    const bool is_over = futex(signal.events, FUTEX_WAIT_BITSET, seen, &deadline) != 0 && errno != EAGAIN;
    if (is_over) return signal.value.load(std::memory_order_acquire) >= at_least;
  }
}

constexpr uint64_t kAlignment = 64;  // a cache line
constexpr uint64_t kSlab = 4096;     // cells are cut from blocks of this size
constexpr uint64_t kCommitStep = uint64_t{1} << 20;

uint64_t round_up(uint64_t size, uint64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

// Best fit with coalescing over the committed part of a file. Blocks of one cache line (cells) have slabs of their
// own, so that small long-lived blocks do not cut up the room of large ones.
class Heap {
 public:
  Heap(int fd, uint64_t capacity) : fd_(fd), capacity_(capacity / kCommitStep * kCommitStep) {}

  int64_t allocate(uint64_t num_bytes, bool may_grow) {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (num_bytes > capacity_) return -ENOSPC;
    const int64_t offset =
        num_bytes <= kAlignment ? take_cell(may_grow) : take_block(round_up(num_bytes, kAlignment), may_grow);
    if (offset > 0) bytes_in_use_ += used_.at(offset);
    return offset;
  }

  bool free(uint64_t offset) {
    const std::lock_guard<std::mutex> guard(mutex_);
    const auto block = used_.find(offset);
    if (block == used_.end()) return false;
    const uint64_t size = block->second;
    used_.erase(block);
    bytes_in_use_ -= size;
    if (size == kAlignment)
      free_cells_.push_back(offset);
    else
      add_room(offset, size);
    return true;
  }

  void usage(uint64_t* committed, uint64_t* in_use) {
    const std::lock_guard<std::mutex> guard(mutex_);
    *committed = committed_;
    *in_use = bytes_in_use_;
  }

 private:
  int64_t take_cell(bool may_grow) {
    if (free_cells_.empty()) {
      const int64_t slab = take_block(kSlab, may_grow);
      if (slab < 0) return slab;
      used_.erase(slab);
      for (uint64_t cell = kSlab; cell > 0; cell -= kAlignment) free_cells_.push_back(slab + cell - kAlignment);
    }
    const uint64_t cell = free_cells_.back();
    free_cells_.pop_back();
    used_[cell] = kAlignment;
    return cell;
  }

  // At least two cache lines, to tell blocks from cells.
  int64_t take_block(uint64_t size, bool may_grow) {
    auto fit = room_by_size_.lower_bound({size, 0});
    if (fit == room_by_size_.end()) {
      if (!may_grow) return -EAGAIN;
      if (const int error = grow_for(size)) return -error;
      fit = room_by_size_.lower_bound({size, 0});
    }
    const auto [room, offset] = *fit;
    remove_room(offset, room);
    if (room > size) add_room(offset + size, room - size);
    used_[offset] = size;
    return offset;
  }

  // Commits what the room at the end lacks for `size`; the kernel refuses here, where SIGBUS would strike later.
  int grow_for(uint64_t size) {
    uint64_t at_end = 0;
    if (!room_by_offset_.empty()) {
      const auto [offset, room] = *std::prev(room_by_offset_.end());
      if (offset + room == committed_) at_end = room;
    }
    const uint64_t first = committed_ == 0 ? kAlignment : 0;  // offset 0 stays unused: it means none
    const uint64_t needed = committed_ + round_up(first + size - at_end, kCommitStep);
    if (needed > capacity_) return ENOSPC;
    while (committed_ < needed) {
      const int error = posix_fallocate(fd_, committed_, kCommitStep);
      if (error == EINTR) continue;
      if (error) return error;
      const uint64_t begin = std::max(committed_, kAlignment);
      add_room(begin, committed_ + kCommitStep - begin);
      committed_ += kCommitStep;
    }
    return 0;
  }

  void add_room(uint64_t offset, uint64_t size) {
    auto next = room_by_offset_.lower_bound(offset);
    if (next != room_by_offset_.end() && offset + size == next->first) {
      size += next->second;
      next = remove_room(next->first, next->second);
    }
    if (next != room_by_offset_.begin()) {
      const auto [before, room] = *std::prev(next);
      if (before + room == offset) {
        offset = before;
        size += room;
        remove_room(before, room);
      }
    }
    room_by_offset_[offset] = size;
    room_by_size_.insert({size, offset});
  }

  std::map<uint64_t, uint64_t>::iterator remove_room(uint64_t offset, uint64_t size) {
    room_by_size_.erase({size, offset});
    return room_by_offset_.erase(room_by_offset_.find(offset));
  }

  const int fd_;
  const uint64_t capacity_;
  std::mutex mutex_;
  uint64_t committed_ = 0;
  uint64_t bytes_in_use_ = 0;
  std::map<uint64_t, uint64_t> room_by_offset_;            // offset -> size; neighbours are joined
  std::set<std::pair<uint64_t, uint64_t>> room_by_size_;   // the same as (size, offset)
  std::vector<uint64_t> free_cells_;
  std::unordered_map<uint64_t, uint64_t> used_;            // offset -> size
};

}  // namespace

void fxpar_signal_set(void* memory, uint64_t value) {
  Signal& signal = as_signal(memory);
  signal.value.store(value, std::memory_order_release);
  signal.events.fetch_add(1);
  if (signal.waiters.load() > 0) futex(signal.events, FUTEX_WAKE, INT_MAX, nullptr);
}

uint64_t fxpar_signal_value(void* memory) { return as_signal(memory).value.load(std::memory_order_acquire); }

int fxpar_signal_wait(void* memory, uint64_t at_least, int64_t timeout_ns) {
  Signal& signal = as_signal(memory);
  if (signal.value.load(std::memory_order_acquire) >= at_least) return 1;
  const timespec deadline = after(timeout_ns);
  signal.waiters.fetch_add(1);
  const bool is_reached = sleep_until(signal, at_least, deadline);
  signal.waiters.fetch_sub(1);
  return is_reached;
}

void* fxpar_heap_create(int fd, uint64_t capacity) { return new Heap(fd, capacity); }

void fxpar_heap_destroy(void* heap) { delete static_cast<Heap*>(heap); }

int64_t fxpar_heap_allocate(void* heap, uint64_t num_bytes, int may_grow) {
  return static_cast<Heap*>(heap)->allocate(num_bytes, may_grow != 0);
}

int fxpar_heap_free(void* heap, uint64_t offset) { return static_cast<Heap*>(heap)->free(offset) ? 0 : -1; }

void fxpar_heap_usage(void* heap, uint64_t* committed, uint64_t* in_use) {
  static_cast<Heap*>(heap)->usage(committed, in_use);
}

#endif
