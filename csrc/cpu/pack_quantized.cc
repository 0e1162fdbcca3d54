// Codes into panels of 32 output columns, four along K together, as vpdpbusd wants them. Done once
// per weight, at load time. Bound: memory.
#include "regatta/pack_quantized.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "gemm.h"
#include "thread_pool.h"

namespace regatta {

void QuantizedLayout::packed_shape(int64_t (&shape)[4]) const {
  const int64_t expected[4] = {num_panels(), num_blocks() * bits, 32, 4};
  std::copy(expected, expected + 4, shape);
}

void QuantizedLayout::scales_shape(int64_t (&shape)[4]) const {
  const int64_t with_zeros[4] = {num_panels(), num_groups, 2, 32};
  const int64_t without[4] = {num_panels(), num_groups, 32, 0};
  std::copy(has_zeros ? with_zeros : without, (has_zeros ? with_zeros : without) + 4, shape);
}

int64_t QuantizedLayout::group_size() const {
  if (num_groups < 1) return 0;
  if (num_groups == 1) return in_features;
  const int64_t size = in_features / num_groups;
  if (size * num_groups == in_features && size % 32 == 0) return size;
  for (int64_t power = 32; power < in_features; power *= 2) {
    if ((in_features + power - 1) / power == num_groups) return power;
  }
  return 0;
}

namespace cpu {
namespace {

// What a stored code is more than the canonical one.
int stored_offset(int bits) { return bits == 8 ? 128 : 0; }

float usual_zero(int bits) { return bits == 8 ? 0.0f : 8.0f; }

// One column of a panel: codes[0 .. K) to every 32nd quadruple. Returns the OR of all codes.
uint8_t pack_column(const int8_t* codes, const QuantizedLayout& layout, bool in_pairs,
                    uint8_t* out) {
  const int64_t num_k = layout.in_features;
  uint8_t seen = 0;
  for (int64_t k = 0; k < num_k; k += 8, out += layout.bits == 8 ? 256 : 128) {
    uint8_t eight[8] = {};
    std::memcpy(eight, codes + k, static_cast<size_t>(std::min<int64_t>(8, num_k - k)));
    for (uint8_t code : eight) seen |= code;
    if (layout.bits == 8) {
      for (uint8_t& code : eight) code ^= 0x80;
      std::memcpy(out, eight, 4);
      std::memcpy(out + 128, eight + 4, 4);
    } else {
      for (int j = 0; j < 4; ++j) {
        const int low = in_pairs ? j % 2 * 4 + j / 2 : j, high = in_pairs ? low + 2 : 4 + j;
        out[j] = static_cast<uint8_t>(eight[low] | eight[high] << 4);
      }
    }
  }
  return seen;
}

void pack_scales(const PackQuantizedParams& p, int64_t panel) {
  const QuantizedLayout& layout = p.layout;
  float* out = p.scales + panel * layout.panel_scales();
  for (int64_t group = 0; group < layout.num_groups; ++group) {
    for (int64_t c = 0; c < kPanel; ++c) {
      const int64_t n = panel * kPanel + c, from = n * layout.num_groups + group;
      const bool inside = n < layout.out_features;
      out[c] = inside ? p.scale[from] : 0.0f;
      if (!layout.has_zeros) continue;
      const float zero =
          p.zero ? p.zero[inside ? from : 0] : usual_zero(layout.bits);  // outside: times scale 0
      out[kPanel + c] = out[c] * (zero + static_cast<float>(stored_offset(layout.bits)));
    }
    out += layout.has_zeros ? 2 * kPanel : kPanel;
  }
}

}  // namespace

Status plan_pack_quantized(const PackQuantizedParams& p, QuantizedLayout* layout) {
  const SchemeInfo& info = scheme_info(p.scheme);
  const std::string name = info.name;
  layout->bits = quantized_bits(info);
  if (layout->bits == 0) {
    return Status::error("scheme '" + name + "' is not one that the CPU packs (allowed: " +
                         scheme_names(quantized_bits) + ")");
  }
  if (layout->group_size() == 0) {
    return Status::error(
        "scale has " + std::to_string(layout->num_groups) + " groups for " +
        std::to_string(layout->in_features) +
        " inputs; the CPU takes groups of 32 and multiples of it (64, 128, ...) and one per output "
        "channel");
  }
  if (!info.has_groups && layout->num_groups != 1) {
    return Status::error("scheme '" + name + "' takes one scale per output channel, got " +
                         std::to_string(layout->num_groups) + " groups");
  }
  if (info.is_mxfp4 && (layout->num_groups != layout->num_blocks() || p.zero)) {
    return Status::error(
        "scheme '" + name + "' takes a scale for each 32 inputs and no zero points, " + "got " +
        std::to_string(layout->num_groups) + " groups for " + std::to_string(layout->in_features) +
        " inputs" + (p.zero ? " and zero points" : ""));
  }
  const int64_t count = layout->out_features * layout->num_groups;
  layout->has_zeros = false;
  const auto not_finite = [&](const char* name, int64_t i, float value) {
    return Status::error(std::string(name) + "[" + std::to_string(i / layout->num_groups) + ", " +
                         std::to_string(i % layout->num_groups) + "] is " + std::to_string(value) +
                         " (allowed: finite numbers)");
  };
  for (int64_t i = 0; i < count; ++i) {
    if (!std::isfinite(p.scale[i])) return not_finite("scale", i, p.scale[i]);
    if (!p.zero || p.zero[i] == usual_zero(layout->bits)) continue;
    if (!std::isfinite(p.zero[i])) return not_finite("zero", i, p.zero[i]);
    layout->has_zeros = true;
  }
  if (layout->has_zeros && info.activations == Activations::kInt8) {
    return Status::error("scheme '" + name +
                         "' takes symmetric weights, got a zero point other than " +
                         std::to_string(static_cast<int>(usual_zero(layout->bits))));
  }
  return {};
}

Status pack_quantized(const PackQuantizedParams& p) {
  const QuantizedLayout& layout = p.layout;
  const SchemeInfo& info = scheme_info(p.scheme);
  std::atomic<int> seen{0};  // relaxed: read behind the region, whose end orders all of it
  parallel([&](Team& team) {
    team.for_chunks(layout.num_panels(), 1, [&](int64_t panel, int64_t) {
      uint8_t* out = p.packed + panel * layout.panel_bytes();
      const int64_t columns = std::min(kPanel, layout.out_features - panel * kPanel);
      if (columns < kPanel || layout.in_features % 32 != 0) {
        std::memset(out, 0, static_cast<size_t>(layout.panel_bytes()));
      }
      int codes_seen = 0;
      for (int64_t c = 0; c < columns; ++c) {
        const int8_t* codes = p.codes + (panel * kPanel + c) * layout.in_features;
        codes_seen |= pack_column(codes, layout, info.is_mxfp4, out + 4 * c);
      }
      seen.fetch_or(codes_seen, std::memory_order_relaxed);
      pack_scales(p, panel);
    });
  });
  if (layout.bits == 4 && (seen & ~15)) {
    return Status::error("codes hold values outside 0 .. 15, which 4 bits cannot store");
  }
  return {};
}

}  // namespace cpu
}  // namespace regatta
