// A causal convolution of each channel, of spans that begin with what others left behind.
#include "rows.inl"

namespace regatta::cpu::REGATTA_ISA {

// Spans of a step, and the slots [slots, width - 1, channels] of their last columns.
struct ConvSpans {
  const int32_t* borders;    // [B + 1] in the step's tokens
  const int32_t *src, *dst;  // [B] slots, -1: zeros, nowhere
  int64_t num_seqs, num_tokens;
  float* slots;
  const float *taps, *bias;  // [width, channels], [channels] or null
  int64_t width, channels;

  int64_t slot_size() const { return (width - 1) * channels; }
};

// fn(sequence, token of the step, place in its span) of each token, from all threads.
template <class Fn>
void for_span_tokens(Team& team, const ConvSpans& spans, int64_t parts, Fn&& fn) {
  team.for_chunks(spans.num_tokens * parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t token = item / parts;
      int64_t low = 0, high = spans.num_seqs;  // the span that has it: borders[low] <= token
      while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        (spans.borders[middle] <= token ? low : high) = middle;
      }
      if (token < spans.borders[spans.num_seqs]) {
        fn(low, token, token - spans.borders[low], item % parts);
      }
    }
  });
}

// The convolution at one token of channels [begin, end): out(channel, n, sum). column(token): where
// the step's input of a token begins, of floats or others.
template <class Column, class Out>
REGATTA_INLINE void conv_token(const ConvSpans& spans, int64_t seq, int64_t token, int64_t place,
                               int64_t begin, int64_t end, Column&& column, Out&& out) {
  for (int64_t c = begin; c < end; c += Vec::kLanes) {
    const int n = lanes_left(end - c);
    Vec sum = spans.bias ? load_n(spans.bias + c, n) : zero();
    for (int64_t tap = 0; tap < spans.width; ++tap) {
      const int64_t at = place + tap - (spans.width - 1);
      const Vec weight = load_n(spans.taps + tap * spans.channels + c, n);
      if (at >= 0) {
        sum = fma(weight, column(token + tap - (spans.width - 1), c, n), sum);
      } else if (spans.src[seq] >= 0) {
        const float* kept = spans.slots + spans.src[seq] * spans.slot_size();
        sum = fma(weight, load_n(kept + (at + spans.width - 1) * spans.channels + c, n), sum);
      }
    }
    out(c, n, sum);
  }
}

// Keeps the last columns of a span for the step behind; behind all conv_token() of the step.
template <class Column>
void keep_columns(const ConvSpans& spans, int64_t seq, Column&& column) {
  if (spans.dst[seq] < 0) return;
  const int64_t begin = spans.borders[seq], length = spans.borders[seq + 1] - begin;
  const int64_t count = spans.width - 1, channels = spans.channels;
  float* const to = spans.slots + spans.dst[seq] * spans.slot_size();
  const float* const from =
      spans.src[seq] < 0 ? nullptr : spans.slots + spans.src[seq] * spans.slot_size();
  for (int64_t row = 0; row < count; ++row) {  // row + length stays ahead where both are one slot
    const int64_t at = length + row - count;
    for (int64_t c = 0; c < channels; c += Vec::kLanes) {
      const int n = lanes_left(channels - c);
      const Vec value = at >= 0 ? column(begin + at, c, n)
                        : from  ? load_n(from + (row + length) * channels + c, n)
                                : zero();
      store_n(to + row * channels + c, value, n);
    }
  }
}

}  // namespace regatta::cpu::REGATTA_ISA
