// BLAKE2b with digests of 32 bytes, without a key (RFC 7693): hashlib.blake2b(data,
// digest_size=32).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace regatta::engine {

using Digest = std::array<uint8_t, 32>;

Digest blake2b(const void* data, size_t size);

}  // namespace regatta::engine
