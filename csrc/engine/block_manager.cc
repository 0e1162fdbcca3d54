#include "engine/block_manager.h"

#include <algorithm>
#include <cassert>
#include <utility>

namespace regatta::engine {

BlockManager::BlockManager(int64_t num_blocks, int64_t block_size, bool prefix_caching)
    : block_size_(block_size),
      prefix_caching_(prefix_caching),
      ref_counts_(num_blocks),
      next_(num_blocks + 1),
      previous_(num_blocks + 1),
      contents_(num_blocks) {
  for (int64_t block = num_blocks; block > 0; --block) free_.push_back(int32_t(block - 1));
  next_.back() = previous_.back() = int32_t(num_blocks);
}

Chain BlockManager::chain_of(const std::string& salt) {
  // Behind the length of a manager's own salt, which is empty here.
  const std::string hashed = std::string(sizeof(uint64_t), '\0') + salt;
  return {blake2b(hashed.data(), hashed.size()), {}};
}

std::string BlockManager::hashed_bytes(const Ids& ids, int64_t index, Chain* chain) const {
  std::vector<Digest>& digests = chain->digests;
  const Digest& parent = index ? digests[index - 1] : chain->root;
  std::string hashed(reinterpret_cast<const char*>(parent.data()), parent.size());
  hashed.append(reinterpret_cast<const char*>(ids.data() + index * block_size_),
                block_size_ * sizeof ids[0]);
  if (index == int64_t(digests.size())) digests.push_back(blake2b(hashed.data(), hashed.size()));
  return hashed;
}

Ids BlockManager::match_prefix(const Ids& ids, Chain* chain) const {
  Ids blocks;
  if (!prefix_caching_) return blocks;
  for (int64_t index = 0; index < (int64_t(ids.size()) - 1) / block_size_; ++index) {
    const std::string hashed = hashed_bytes(ids, index, chain);
    const auto found = block_of_.find(chain->digests[index]);
    // Token ids compared: a digest may collide, and wrong text must not be the price.
    if (found == block_of_.end() || contents_[found->second].hashed != hashed) break;
    blocks.push_back(found->second);
  }
  return blocks;
}

bool BlockManager::can_allocate(int64_t num_new, const Ids& shared) const {
  for (const int32_t block : shared) num_new += ref_counts_[block] == 0;
  return num_new <= num_free_blocks();
}

void BlockManager::acquire(const Ids& blocks) {
  for (const int32_t block : blocks) {
    if (ref_counts_[block]++ == 0) remove_cached_free(block);
  }
}

void BlockManager::allocate(int64_t num_new, Ids* blocks) {
  assert(num_new <= num_free_blocks());
  for (; num_new > 0; --num_new) {
    int32_t block;
    if (!free_.empty()) {
      block = free_.back();
      free_.pop_back();
    } else {
      block = next_.back();  // the oldest
      remove_cached_free(block);
      block_of_.erase(contents_[block].digest);
      contents_[block] = {};
    }
    ref_counts_[block] = 1;
    blocks->push_back(block);
  }
}

void BlockManager::publish(const Ids& blocks, const Ids& ids, Chain* chain, int64_t first,
                           int64_t last) {
  if (!prefix_caching_) return;
  for (int64_t index = first; index < last; ++index) {
    std::string hashed = hashed_bytes(ids, index, chain);
    const Digest& digest = chain->digests[index];
    if (block_of_.emplace(digest, blocks[index]).second) {
      contents_[blocks[index]] = {digest, std::move(hashed)};
    }
  }
}

void BlockManager::free(const Ids& blocks) {
  // Last block first: it becomes the older one, so a chain is evicted from its tail and what
  // remains can still be matched from its head.
  for (auto block = blocks.rbegin(); block != blocks.rend(); ++block) {
    assert(ref_counts_[*block] > 0);
    if (--ref_counts_[*block] > 0) continue;
    if (contents_[*block].hashed.empty()) {
      free_.push_back(*block);
    } else {
      append_cached_free(*block);
    }
  }
}

bool BlockManager::is_held_by(const Ids& blocks) const {
  std::vector<int32_t> counts(ref_counts_.size());
  for (const int32_t block : blocks) ++counts[block];
  int64_t num_held = 0;
  for (const int32_t count : counts) num_held += count > 0;
  return counts == ref_counts_ && num_held + num_free_blocks() == num_blocks();
}

void BlockManager::append_cached_free(int32_t block) {
  const auto end = int32_t(num_blocks());
  previous_[block] = previous_[end];
  next_[block] = end;
  next_[previous_[end]] = block;
  previous_[end] = block;
  ++num_cached_free_;
}

void BlockManager::remove_cached_free(int32_t block) {
  assert(!contents_[block].hashed.empty());
  next_[previous_[block]] = next_[block];
  previous_[next_[block]] = previous_[block];
  --num_cached_free_;
}

}  // namespace regatta::engine
