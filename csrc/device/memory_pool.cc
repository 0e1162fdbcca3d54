#include "memory_pool.h"

#include <algorithm>
#include <iterator>

namespace regatta::device {
namespace {

constexpr size_t kKiB = 1 << 10, kMiB = 1 << 20;
constexpr size_t kSmallLimit = 1 * kMiB, kMediumLimit = 10 * kMiB;
// cudaMalloc's own granularity is 2 MiB: smaller segments would waste the difference.
constexpr size_t kSmallSegment = 2 * kMiB, kMediumSegment = 32 * kMiB, kLargeUnit = 2 * kMiB;
constexpr size_t kUnits[] = {512, 64 * kKiB, kLargeUnit};

constexpr size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

MemoryPool::SizeClass MemoryPool::size_class_of(size_t bytes) {
  return bytes <= kSmallLimit ? kSmall : bytes <= kMediumLimit ? kMedium : kLarge;
}

size_t MemoryPool::rounded(size_t bytes) {
  // SIZE_MAX asks for more than there is; rounding it would wrap around to nothing.
  if (bytes > SIZE_MAX - kLargeUnit) return bytes;
  return round_up(std::max<size_t>(bytes, 1), kUnits[size_class_of(bytes)]);
}

size_t MemoryPool::segment_size(size_t rounded_bytes) {
  switch (size_class_of(rounded_bytes)) {
    case kSmall:
      return kSmallSegment;
    case kMedium:
      return kMediumSegment;
    default:
      return rounded_bytes;
  }
}

void* MemoryPool::allocate(size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const size_t size = rounded(bytes);
  const SizeClass size_class = size_class_of(bytes);
  void* pointer = take(size, size_class);
  if (!pointer && !waiting_.empty() && collect_waiting()) pointer = take(size, size_class);
  if (!pointer && grow(size, size_class)) pointer = take(size, size_class);
  return pointer;
}

void* MemoryPool::take(size_t bytes, SizeClass size_class) {
  auto& free = free_[size_class];
  const auto found = free.lower_bound({bytes, nullptr});
  if (found == free.end()) return nullptr;
  const auto block = blocks_.find(found->second);
  free.erase(found);
  const size_t rest = block->second.size - bytes;
  if (rest > 0) {
    block->second.size = bytes;
    char* const tail = block->first + bytes;
    blocks_.emplace_hint(std::next(block), tail, Block{rest, State::kFree, size_class, false});
    free.emplace(rest, tail);
  }
  block->second.state = State::kInUse;
  block->second.kept = keeping_;
  stats_.in_use += block->second.size;
  stats_.peak_in_use = std::max(stats_.peak_in_use, stats_.in_use);
  ++stats_.num_blocks_in_use;
  return block->first;
}

bool MemoryPool::grow(size_t bytes, SizeClass size_class) {
  size_t size = segment_size(bytes);
  void* pointer = source_->allocate(size);
  if (!pointer && release_free_segments() > 0) pointer = source_->allocate(size);
  if (!pointer && size > round_up(bytes, kLargeUnit)) {  // the last bytes of a full device
    size = round_up(bytes, kLargeUnit);
    pointer = source_->allocate(size);
  }
  if (!pointer) return false;
  char* const start = static_cast<char*>(pointer);
  blocks_.emplace(start, Block{size, State::kFree, size_class, true});
  free_[size_class].emplace(size, start);
  stats_.held += size;
  ++stats_.num_segments;
  return true;
}

bool MemoryPool::free(void* pointer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto block = blocks_.find(static_cast<char*>(pointer));
  if (block == blocks_.end() || block->second.state != State::kInUse) return false;
  if (block->second.kept) {
    block->second.state = State::kKept;
    kept_.push_back(block->first);
    return true;
  }
  block->second.state = State::kWaiting;
  waiting_.push_back(block->first);
  stats_.in_use -= block->second.size;
  --stats_.num_blocks_in_use;
  return true;
}

void MemoryPool::keep(bool on) {
  const std::lock_guard<std::mutex> lock(mutex_);
  keeping_ = on;
}

void MemoryPool::add_owner() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++num_owners_;
}

void MemoryPool::drop_owner() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (--num_owners_ > 0) return;
  for (auto& [start, block] : blocks_) block.kept = false;
  for (char* const start : kept_) {
    Block& block = blocks_.find(start)->second;
    block.state = State::kWaiting;
    waiting_.push_back(start);
    stats_.in_use -= block.size;
    --stats_.num_blocks_in_use;
  }
  kept_.clear();
}

bool MemoryPool::collect_waiting() {
  if (!source_->synchronize()) return false;
  for (char* const start : waiting_) make_free(blocks_.find(start));
  waiting_.clear();
  return true;
}

// Merges with free neighbours of the same segment:  | previous | block | next |
void MemoryPool::make_free(Blocks::iterator block) {
  block->second.state = State::kFree;
  auto& free = free_[block->second.size_class];
  const auto next = std::next(block);
  if (next != blocks_.end() && !next->second.starts_segment && next->second.state == State::kFree) {
    free.erase({next->second.size, next->first});
    block->second.size += next->second.size;
    blocks_.erase(next);
  }
  if (!block->second.starts_segment) {
    const auto previous = std::prev(block);
    if (previous->second.state == State::kFree) {
      free.erase({previous->second.size, previous->first});
      previous->second.size += block->second.size;
      blocks_.erase(block);
      block = previous;
    }
  }
  free.emplace(block->second.size, block->first);
}

size_t MemoryPool::release_cached() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return release_free_segments();
}

size_t MemoryPool::release_free_segments() {
  // Also when nothing waits: releasing synchronizes the device, which a capture forbids.
  if (!collect_waiting()) return 0;
  size_t released = 0;
  for (auto block = blocks_.begin(); block != blocks_.end();) {
    const auto next = std::next(block);
    const bool whole =
        block->second.starts_segment && (next == blocks_.end() || next->second.starts_segment);
    if (whole && block->second.state == State::kFree) {
      free_[block->second.size_class].erase({block->second.size, block->first});
      source_->release(block->first);
      released += block->second.size;
      --stats_.num_segments;
      blocks_.erase(block);
    }
    block = next;
  }
  stats_.held -= released;
  return released;
}

PoolStats MemoryPool::stats() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return stats_;
}

}  // namespace regatta::device
