// What the registrations of the attention ops share beside runtime/step.h.
#pragma once

#include "common.h"
#include "runtime/step.h"

namespace regatta::binding {

inline KvFormat kv_format_of(const std::string& name) {
  KvFormat format;
  throw_if_error(runtime::parse(name, &format));
  return format;
}

// A layer's caches.
inline PagedCache cache_of(const Tensors& caches, KvFormat format, DType dtype,
                           int64_t num_kv_heads, int64_t head_dim, const phi::Place& place) {
  PagedCache cache;
  throw_if_error(runtime::cache_of(views(caches, "caches", place).data(), format, dtype,
                                   num_kv_heads, head_dim, &cache));
  return cache;
}

inline void check_num_caches(size_t num_caches, KvFormat format) {
  const size_t expected = num_kv_tensors(format, 2);
  if (num_caches == expected) return;
  fail("caches holds " + std::to_string(num_caches) + " tensors for 1 layer of kv_format " +
       kv_format_info(format).name + " (expected: " + std::to_string(expected) +
       " for each: key, value" + (expected == 4 ? ", key scales, value scales)" : ")"));
}

}  // namespace regatta::binding
