// Which drafts stand by PaddleNLP's TopP + window verification: predict/engine/window.py is
// the definition.
//
// The work on a row is written for a team of threads, so that one source is the kernel of a GPU
// and, with a team of one, ordinary C++.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "regatta/types.h"

#ifdef __CUDACC__
#define REGATTA_TEAM __device__ inline
#else
#define REGATTA_TEAM inline
#endif

namespace regatta {

// L rows, V vocabulary, T tokens.
struct VerifyWindowParams {
  const float* logits = nullptr;           // [L, V], as tokens were drawn from
  const float* temperature = nullptr;      // [L], and so on: see SampleParams
  const int32_t* top_k = nullptr;          // [L]
  const float* top_p = nullptr;            // [L]
  const float* min_p = nullptr;            // [L]
  const int32_t* num_drafts = nullptr;     // [L] drafts from the row on: n, n - 1, ..., 0 in a
                                           // span; all 0 where what was drawn stays
  const int32_t* token_ids = nullptr;      // [T]; row r's draft is token_ids[logit_indices[r] + 1]
  const int32_t* logit_indices = nullptr;  // [L]
  int32_t* verdicts = nullptr;             // [L] scratch: of rows with drafts, see Verdict
  int32_t* drawn = nullptr;                // [L] tokens; in place, those drafts that stand
  int64_t num_rows = 0;
  int64_t num_tokens = 0;
  int64_t vocab_size = 0;
  int32_t window = 0;             // likeliest drafts that let a second likeliest one in front stand
  int32_t max_candidate_len = 2;  // 2 to kMaxWindowCandidates
};

constexpr int kMaxWindowCandidates = 10;

// Of a draft in its row; a sum of these.
enum Verdict : int32_t { kMayBeDrawn = 1, kLikeliest = 2, kSecondLikeliest = 4 };

// What a team shares for a row.
struct WindowScratch {
  static constexpr int kBits = 8, kBins = 1 << kBits;
  int32_t counts[kBins];
  int32_t bin, num_above, num_before;
  float before[kMaxWindowCandidates];  // logits of the tokens in front of the draft
};

// Larger words for larger floats; -0 equals 0.
REGATTA_TEAM uint32_t window_word(float x) {
  x += 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The word of the `count`-th largest of `size` logits, and how many are larger. Team: see
// verify_row.
template <class Team>
REGATTA_TEAM uint32_t nth_word(const Team& team, WindowScratch& s, const float* logits, int size,
                               int count, int* num_above) {
  constexpr int kBits = WindowScratch::kBits, kBins = WindowScratch::kBins;
  uint32_t prefix = 0, mask = 0;
  int above = 0;
  for (int shift = 32 - kBits; shift >= 0; shift -= kBits) {
    for (int b = team.thread(); b < kBins; b += team.size()) s.counts[b] = 0;
    team.sync();
    for (int begin = 0; begin < size; begin += team.size()) {
      const int i = begin + team.thread();
      const uint32_t word = i < size ? window_word(logits[i]) : 0;
      const bool counts = i < size && (word & mask) == prefix;
      team.count(s.counts, counts ? static_cast<int>(word >> shift & (kBins - 1)) : -1);
    }
    team.sync();
    for (int b = team.thread(); b < kBins; b += team.size()) {
      int higher = above;
      for (int c = b + 1; c < kBins; ++c) higher += s.counts[c];
      if (higher < count && higher + s.counts[b] >= count) s.bin = b, s.num_above = higher;
    }
    team.sync();
    prefix |= static_cast<uint32_t>(s.bin) << shift;
    mask |= static_cast<uint32_t>(kBins - 1) << shift;
    above = s.num_above;
    team.sync();
  }
  *num_above = above;
  return prefix;
}

// The Verdict of row r's draft, in every thread. A team has: thread(), size(); sync(), a barrier;
// max(float) and sum(int or double) of all threads' values, in every thread; add(int*, int),
// atomic, which returns the old value; count(int* bins, int bin), which adds 1 to a bin (-1: to
// none) and is called by all threads together.
template <class Team>
REGATTA_TEAM int32_t verify_row(const Team& team, WindowScratch& s, const VerifyWindowParams& p,
                                int64_t r) {
  const int size = static_cast<int>(p.vocab_size);
  const int64_t place = int64_t{p.logit_indices[r]} + 1;
  const int draft = place < p.num_tokens ? p.token_ids[place] : -1;
  if (draft < 0 || draft >= size) return 0;  // it could not be drawn itself
  const float* logits = p.logits + r * p.vocab_size;
  const float own = logits[draft];
  if (!(own > -INFINITY)) return 0;  // banned
  const auto comes_before = [&](float x, int i) { return x > own || (x == own && i < draft); };
  float largest = -INFINITY;
  int rank = 0;
  for (int i = team.thread(); i < size; i += team.size()) {
    const float x = logits[i];
    largest = x > largest ? x : largest;
    rank += comes_before(x, i);
  }
  largest = team.max(largest);
  rank = team.sum(rank);
  if (rank == 0) return kMayBeDrawn | kLikeliest;
  const int32_t verdict = rank == 1 ? kSecondLikeliest : 0;
  const int top_k = p.top_k[r] < size ? p.top_k[r] : 0;
  const double top_p = static_cast<double>(p.top_p[r]);
  const float inverse_temperature = 1.0f / (p.temperature[r] > 1e-30f ? p.temperature[r] : 1e-30f);
  const auto weight = [&](float x) {
    return static_cast<double>(expf((x - largest) * inverse_temperature));
  };
  if (rank >= p.max_candidate_len || (top_k > 0 && rank >= top_k)) return verdict;
  if (!(weight(own) >= static_cast<double>(p.min_p[r]))) return verdict;

  // Weight of the tokens in front, and of all that top_k keeps.
  if (team.thread() == 0) s.num_before = 0;
  team.sync();
  const bool narrowed = top_p < 1.0;
  double kept = 0.0;
  for (int i = team.thread(); i < size; i += team.size()) {
    const float x = logits[i];
    if (comes_before(x, i)) s.before[team.add(&s.num_before, 1)] = x;  // `rank` of them
    if (narrowed && top_k == 0) kept += weight(x);
  }
  team.sync();
  double before = 0.0;
  for (int i = 0; i < rank; ++i) before += weight(s.before[i]);
  if (!narrowed) {
    kept = before + weight(own);  // or more: the draft is one of those kept
  } else if (top_k == 0) {
    kept = team.sum(kept);
  } else {
    int num_above = 0;
    const uint32_t word = nth_word(team, s, logits, size, top_k, &num_above);
    float least = -INFINITY;  // of those kept
    for (int i = team.thread(); i < size; i += team.size()) {
      const uint32_t own_word = window_word(logits[i]);
      if (own_word > word) kept += weight(logits[i]);
      if (own_word == word) least = logits[i];
    }
    kept = team.sum(kept);
    kept += (top_k - num_above) * weight(team.max(least));
  }
  return before < top_p * kept ? verdict | kMayBeDrawn : verdict;
}

// Puts the drafts of a span that stand in the places of what was drawn there.
// drafts, verdicts: [num_drafts]. drawn: [num_drafts + 1].
REGATTA_TEAM void keep_standing(const int32_t* drafts, const int32_t* verdicts, int num_drafts,
                                int window, int32_t* drawn) {
  for (int i = 0; i <= num_drafts; ++i) {
    if (drawn[i] < 0) return;
  }
  for (int i = 0; i < num_drafts; ++i) {
    if (verdicts[i] & kMayBeDrawn) {
      drawn[i] = drafts[i];
      continue;
    }
    bool stands = (verdicts[i] & kSecondLikeliest) != 0 && i + window < num_drafts;
    for (int k = 1; k <= window && stands; ++k) stands = (verdicts[i + k] & kLikeliest) != 0;
    if (stands) {
      for (const int end = i + window; i <= end; ++i) drawn[i] = drafts[i];
    }
    // The token that is drawn here ends the text, unless it is the draft itself.
    if (i < num_drafts && drawn[i] != drafts[i]) return;
  }
}

// Row r, where a span with drafts begins; other rows have no work.
REGATTA_TEAM void verify_span(const VerifyWindowParams& p, int64_t r) {
  const int32_t num_drafts = p.num_drafts[r];
  if (num_drafts == 0 || (r > 0 && p.num_drafts[r - 1] != 0)) return;
  keep_standing(p.token_ids + p.logit_indices[r] + 1, p.verdicts + r, num_drafts, p.window,
                p.drawn + r);
}

}  // namespace regatta
