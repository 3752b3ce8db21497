// Memory that the ranks of one host share: signals on futexes, and a heap.
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
  std::atomic<uint32_t> events;   // how often it was set: the futex word, by which the kernel detects a late waiter
  std::atomic<uint32_t> waiters;  // a waiter killed in its sleep stays counted, which only costs useless wakes
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

constexpr uint64_t kCell = 64;  // a cache line
constexpr uint64_t kCellStep = uint64_t{1} << 16;
constexpr uint64_t kBlockStep = uint64_t{1} << 20;

uint64_t round_up(uint64_t size, uint64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

// A range of a sparse file, whose pages are committed from its beginning on.
struct Region {
  const int fd;
  const uint64_t begin;
  const uint64_t end;
  uint64_t committed = begin;  // up to here

  // Commits `size` more bytes, so that a lack of memory is an error here and not a SIGBUS later. Returns 0, or an
  // errno, after which a part may be committed. In steps, since an interrupted call starts anew.
  int extend(uint64_t size) {
    if (size > end - committed) return ENOSPC;
    for (const uint64_t target = committed + size; committed < target;) {
      const uint64_t step = std::min(kBlockStep, target - committed);
      const int error = posix_fallocate(fd, committed, step);
      if (error == 0) committed += step;
      if (error != 0 && error != EINTR) return error;
    }
    return 0;
  }
};

// Small blocks are cells in a region of their own, so that they, which may be long-lived, do not fragment the memory of
// large ones. Large blocks are allocated by best fit, and free neighbours are joined.
class Heap {
 public:
  Heap(int fd, uint64_t capacity)
      : cells_{fd, 0, round_up(capacity / 64, kBlockStep)},
        blocks_{fd, cells_.end, std::max(capacity / kBlockStep * kBlockStep, cells_.end)} {}

  int64_t allocate(uint64_t num_bytes, bool may_grow) {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (num_bytes > blocks_.end) return -ENOSPC;
    const bool is_cell = num_bytes <= kCell;
    const uint64_t size = round_up(std::max(num_bytes, uint64_t{1}), kCell);
    if (is_cell ? free_cells_.empty() : !fits(size)) {
      if (!may_grow) return -EAGAIN;
      if (const int error = is_cell ? add_cells() : add_room_for(size)) return -error;
    }
    const uint64_t offset = is_cell ? take_cell() : take_room(size);
    used_[offset] = size;
    bytes_in_use_ += size;
    return offset;
  }

  bool free(uint64_t offset) {
    const std::lock_guard<std::mutex> guard(mutex_);
    const auto block = used_.find(offset);
    if (block == used_.end()) return false;
    if (offset < cells_.end)
      free_cells_.push_back(offset);
    else
      add_room(offset, block->second);
    bytes_in_use_ -= block->second;
    used_.erase(block);
    return true;
  }

  void usage(uint64_t* committed, uint64_t* in_use) {
    const std::lock_guard<std::mutex> guard(mutex_);
    *committed = cells_.committed + (blocks_.committed - blocks_.begin);
    *in_use = bytes_in_use_;
  }

 private:
  int add_cells() {
    const uint64_t first = std::max(cells_.committed, kCell);  // offset 0 stays unused: it means none
    if (const int error = cells_.extend(kCellStep)) return error;
    for (uint64_t cell = cells_.committed - kCell; cell >= first; cell -= kCell) free_cells_.push_back(cell);
    return 0;
  }

  uint64_t take_cell() {
    const uint64_t cell = free_cells_.back();
    free_cells_.pop_back();
    return cell;
  }

  bool fits(uint64_t size) const { return room_by_size_.lower_bound({size, 0}) != room_by_size_.end(); }

  // Commits the bytes that the free block at the end, if there is one, lacks for `size`.
  int add_room_for(uint64_t size) {
    uint64_t at_end = 0;
    if (!room_by_offset_.empty()) {
      const auto [offset, room] = *std::prev(room_by_offset_.end());
      if (offset + room == blocks_.committed) at_end = room;
    }
    const uint64_t before = blocks_.committed;
    const int error = blocks_.extend(round_up(size - at_end, kBlockStep));
    if (blocks_.committed > before) add_room(before, blocks_.committed - before);
    return error;
  }

  uint64_t take_room(uint64_t size) {
    const auto [room, offset] = *room_by_size_.lower_bound({size, 0});
    remove_room(offset, room);
    if (room > size) add_room(offset + size, room - size);
    return offset;
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

  std::mutex mutex_;
  Region cells_;
  Region blocks_;
  std::vector<uint64_t> free_cells_;
  std::map<uint64_t, uint64_t> room_by_offset_;           // offset -> size; neighbours are joined
  std::set<std::pair<uint64_t, uint64_t>> room_by_size_;  // the same as (size, offset)
  std::unordered_map<uint64_t, uint64_t> used_;           // offset -> size
  uint64_t bytes_in_use_ = 0;
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
