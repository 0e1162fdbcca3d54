// A caching pool of device memory, without CUDA in it: the device is behind an interface, so that
// the tests run it over ordinary memory.
//
// Three size classes, each with its own segments (pieces of memory got from the device), so that
// short-lived small tensors do not pin large segments:
//   small   <= 1 MiB     rounded to 512 B      cut from segments of 2 MiB
//   medium  <= 10 MiB    rounded to 64 KiB     cut from segments of 32 MiB
//   large                rounded to 2 MiB      a segment each; a free one is cut when it is larger
// A request takes the smallest free block that fits; a freed block merges with its free neighbours.
// The classes follow PyTorch's allocator; unlike there, freed memory is not handed out again before
// the device has been synchronized once (see `free`), since this pool serves all streams at once
// and sees only the chunks that Paddle's own allocator, above it, gives up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

namespace regatta::device {

// Where the pool's memory comes from.
class MemorySource {
 public:
  virtual ~MemorySource() = default;
  virtual void* allocate(size_t bytes) = 0;  // null when there is no more
  virtual void release(void* pointer) = 0;
  // Waits for all work on the device. False when that is not possible now (a graph is being
  // captured); nothing has been waited for then.
  virtual bool synchronize() = 0;
};

struct PoolStats {
  uint64_t held = 0;         // bytes got from the device
  uint64_t in_use = 0;       // of these, bytes handed out
  uint64_t peak_in_use = 0;  // the largest in_use so far
  uint64_t num_segments = 0;
  uint64_t num_blocks_in_use = 0;
};

// Thread-safe.
class MemoryPool {
 public:
  explicit MemoryPool(MemorySource* source) : source_(source) {}

  // At least `bytes` (of 0: one unit), aligned to 512 bytes; null when out of memory.
  void* allocate(size_t bytes);

  // Takes `pointer` back; false when it is not one that the pool handed out. Work that was queued
  // on the device before this call may still use the memory: it is given out again only after the
  // device was synchronized, which `allocate` does when it has nothing else (cudaFree does so at
  // once).
  bool free(void* pointer);

  // Gives wholly free segments back to the device; returns their bytes.
  size_t release_cached();

  // Recorded graphs use memory that their recording has given back long since. What is handed out
  // between keep(true) and keep(false) is not handed out again, nor released, before every owner
  // that said add_owner() has said drop_owner().
  void keep(bool on);
  void add_owner();
  void drop_owner();

  PoolStats stats() const;

 private:
  // waiting: freed, not yet synchronized; kept: freed, and a graph may use it.
  enum class State : uint8_t { kFree, kInUse, kWaiting, kKept };
  enum SizeClass : uint8_t { kSmall, kMedium, kLarge };

  struct Block {
    size_t size;
    State state;
    SizeClass size_class;
    bool starts_segment;
    bool kept = false;
  };
  using Blocks = std::map<char*, Block>;

  static SizeClass size_class_of(size_t bytes);
  static size_t rounded(size_t bytes);
  static size_t segment_size(size_t rounded_bytes);

  void* take(size_t bytes, SizeClass size_class);
  bool grow(size_t bytes, SizeClass size_class);
  bool collect_waiting();
  void make_free(Blocks::iterator block);
  size_t release_free_segments();

  mutable std::mutex mutex_;
  MemorySource* source_;
  Blocks blocks_;                               // by address
  std::set<std::pair<size_t, char*>> free_[3];  // by size, then address
  std::vector<char*> waiting_;
  std::vector<char*> kept_;  // freed, but kept for graphs
  bool keeping_ = false;
  int num_owners_ = 0;
  PoolStats stats_;
};

}  // namespace regatta::device
