// Ownership of the cache's blocks: reference counts, prefix cache, least-recently-used eviction.
// The twin of predict/engine/block_manager.py, to the digest: the same calls give the same ids.
//
//     used (ref count > 0)  <--allocate--  free, without cached content  (taken first, a stack)
//                           <--acquire---  free, cached content kept     (evicted oldest first)
#pragma once

#include <cstring>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/blake2b.h"
#include "engine/ids.h"

namespace regatta::engine {

// What a sequence's blocks are known by: where the hashes begin, which is the salt's own, and the
// digests of the leading blocks that were hashed so far. One for each sequence.
struct Chain {
  Digest root;
  std::vector<Digest> digests;
};

inline int64_t num_blocks_for(int64_t num_tokens, int64_t block_size) {
  return (num_tokens + block_size - 1) / block_size;
}

// Callers keep to the rules of each function, which assert() checks: the scheduler is the only one.
class BlockManager {
 public:
  BlockManager(int64_t num_blocks, int64_t block_size, bool prefix_caching);

  // The chain of a sequence without tokens. Those of other salts share no blocks.
  static Chain chain_of(const std::string& salt);

  int64_t num_blocks() const { return static_cast<int64_t>(ref_counts_.size()); }
  int64_t num_free_blocks() const { return static_cast<int64_t>(free_.size()) + num_cached_free_; }
  int64_t num_used_blocks() const { return num_blocks() - num_free_blocks(); }

  // The blocks of the longest cached prefix of `ids`: whole blocks, never all of the ids. Takes no
  // reference.
  Ids match_prefix(const Ids& ids, Chain* chain) const;

  // Whether acquire(shared) followed by allocate(num_new) would succeed.
  bool can_allocate(int64_t num_new, const Ids& shared = {}) const;

  // Adds a reference to each block, which must be cached or used.
  void acquire(const Ids& blocks);

  // Appends blocks for one owner to write; as many must be free.
  void allocate(int64_t num_new, Ids* blocks);

  // Lets others match blocks first .. last - 1 of a sequence. A block whose prefix another one
  // holds stays private.
  void publish(const Ids& blocks, const Ids& ids, Chain* chain, int64_t first, int64_t last);

  // Drops a reference from each block; published ones keep their content until they are evicted.
  void free(const Ids& blocks);

  // Whether each block is held so many times as `blocks` has it, and all others are free.
  bool is_held_by(const Ids& blocks) const;

 private:
  struct Hash {
    size_t operator()(const Digest& digest) const {
      size_t value;
      std::memcpy(&value, digest.data(), sizeof value);
      return value;
    }
  };
  struct Content {
    Digest digest;
    std::string hashed;  // empty: none
  };

  // The bytes that a block's digest hashes; appends the digest where it is missing.
  std::string hashed_bytes(const Ids& ids, int64_t index, Chain* chain) const;
  void append_cached_free(int32_t block);
  void remove_cached_free(int32_t block);

  const int64_t block_size_;
  const bool prefix_caching_;
  std::vector<int32_t> ref_counts_;
  Ids free_;  // a stack
  // Free blocks with content, oldest first: a ring through the place behind the last block.
  Ids next_, previous_;
  int64_t num_cached_free_ = 0;
  std::unordered_map<Digest, int32_t, Hash> block_of_;
  std::vector<Content> contents_;
};

}  // namespace regatta::engine
