// Paged attention. Included once per instruction set.
//
// A query visits the pages of its sequence in order, one page at a time, and keeps a running maximum, so its result
// does not depend on how the prompt was split into chunks, or on what else is in the batch.
#pragma once

#include <algorithm>
#include <cmath>

namespace OSTRO_ISA {

constexpr int kPageVectors = kPage / kPanel;

template <typename Cell>
struct HeadPage {
  Cell* keys;
  Cell* values;
  float* key_scales;
  float* value_scales;

  HeadPage(const HeadPages& head, int dim, long page)
      : keys(reinterpret_cast<Cell*>(head.first + page * head.stride)),
        values(keys + kPage * dim),
        key_scales(reinterpret_cast<float*>(values + kPage * dim)),
        value_scales(key_scales + kPage) {}
};

// A page's unscaled scores for some queries.
template <int queries, typename Cell>
inline void page_scores(const float* q, int dim, const Cell* keys, const Cell* next,
                        Floats (&scores)[queries][kPageVectors]) {
  // Local sums: nothing else can alias them, so they stay in registers.
  Floats sums[queries][kPageVectors];
  for (auto& query : sums)
    for (auto& value : query) value = zeros();
  for (int d = 0; d < dim; d += 4, keys += 4 * kPage, next += 4 * kPage) {
    for (int i = 0; i < 4 * kPage; i += 64 / sizeof(Cell)) fetch(next + i);
    Lanes<4> four[queries];
    for (int query = 0; query < queries; ++query) four[query] = Lanes<4>(q + query * dim + d);
    each_lane<4>([&]<int at>() OSTRO_BODY {
      for (int i = 0; i < kPageVectors; ++i) {
        const Floats key = load(keys + at * kPage + i * kPanel);
        for (int query = 0; query < queries; ++query)
          sums[query][i] = four[query].template add<at>(sums[query][i], key);
      }
    });
  }
  for (int query = 0; query < queries; ++query)
    for (int i = 0; i < kPageVectors; ++i) scores[query][i] = sums[query][i];
}

// Adds a page's weighted values to each query's output.
template <int queries, typename Cell>
inline void add_values(const float (&weights)[queries][kPage], const Cell* values, const Cell* next, int begin, int end,
                       int dim, float* out) {
  constexpr int kWide = 16 / kPanel > 1 ? 16 / kPanel : 1;
  for (int d = 0; d < dim; d += kWide * kPanel) {
    for (int i = 0; i < kPage; ++i) fetch(next + i * dim + d);
    Floats sums[queries][kWide];
    for (int query = 0; query < queries; ++query)
      for (int i = 0; i < kWide; ++i) sums[query][i] = load(out + query * dim + d + i * kPanel);
    auto one = [&](int slot) {
      for (int i = 0; i < kWide; ++i) {
        const Floats value = load(values + slot * dim + d + i * kPanel);
        for (int query = 0; query < queries; ++query)
          sums[query][i] = madd(sums[query][i], value, weights[query][slot]);
      }
    };
    int slot = begin;
    for (; slot < end && slot % 4; ++slot) one(slot);
    for (; slot + 4 <= end; slot += 4) {
      Lanes<4> four[queries];
      for (int query = 0; query < queries; ++query) four[query] = Lanes<4>(weights[query] + slot);
      each_lane<4>([&]<int at>() OSTRO_BODY {
        for (int i = 0; i < kWide; ++i) {
          const Floats value = load(values + (slot + at) * dim + d + i * kPanel);
          for (int query = 0; query < queries; ++query)
            sums[query][i] = four[query].template add<at>(sums[query][i], value);
        }
      });
    }
    for (; slot < end; ++slot) one(slot);
    for (int query = 0; query < queries; ++query)
      for (int i = 0; i < kWide; ++i) store(out + query * dim + d + i * kPanel, sums[query][i]);
  }
}

// The part of a page that a query sees: slots [begin, end).
struct Seen {
  int begin, end;

  bool all_of_it() const { return begin == 0 && end == kPage; }
  // Writes `value` to all slots outside.
  void blank(Floats (&row)[kPageVectors], float value) const {
    float slots[kPage];
    for (int i = 0; i < kPageVectors; ++i) store(slots + i * kPanel, row[i]);
    for (int slot = 0; slot < begin; ++slot) slots[slot] = value;
    for (int slot = end; slot < kPage; ++slot) slots[slot] = value;
    for (int i = 0; i < kPageVectors; ++i) row[i] = load(slots + i * kPanel);
  }
};

// Scales scores, and returns the best of those seen.
inline float scale_scores(const Attention& how, const float* slot_scales, Seen seen, Floats (&row)[kPageVectors]) {
  for (int i = 0; i < kPageVectors; ++i) {
    row[i] = row[i] * how.scale;
    if (slot_scales) row[i] = row[i] * load(slot_scales + i * kPanel);
    if (how.cap > 0.0f) row[i] = softcapped(row[i], how.cap);
  }
  if (!seen.all_of_it()) seen.blank(row, -INFINITY);
  Floats most = row[0];
  for (int i = 1; i < kPageVectors; ++i) most = max(most, row[i]);
  return largest(most);
}

// Turns scores into weights, exp(score - best so far); returns their sum.
inline float weigh_scores(float top, Seen seen, Floats (&row)[kPageVectors]) {
  for (int i = 0; i < kPageVectors; ++i) row[i] = exponential(row[i] - all(top));
  if (!seen.all_of_it()) seen.blank(row, 0.0f);
  Floats sum = row[0];
  for (int i = 1; i < kPageVectors; ++i) sum = sum + row[i];
  return total(sum);
}

template <int queries, typename Cell>
inline void attend_queries(const Attention& how, const HeadPages& head, const int32_t* pages, int position,
                           const float* sinks, const float* q, float* out) {
  const int dim = how.dim, first = how.window ? std::max(0, position + 1 - how.window) : 0;
  float top[queries], sum[queries];
  for (int query = 0; query < queries; ++query) top[query] = -INFINITY, sum[query] = 0.0f;
  std::fill(out, out + queries * dim, 0.0f);
  const int last = position / kPage;
  for (int page = first / kPage; page <= last; ++page) {
    const Seen seen{std::max(0, first - page * kPage), std::min(kPage, position + 1 - page * kPage)};
    constexpr bool kScaled = std::is_same_v<Cell, int8_t>;
    const HeadPage<Cell> here(head, dim, pages[page]);
    // Pages are scattered in memory: prefetch the next one while working on this one.
    const HeadPage<Cell> next(head, dim, pages[std::min(page + 1, last)]);
    Floats scores[queries][kPageVectors];
    page_scores(q, dim, here.keys, next.keys, scores);
    float weights[queries][kPage];
    for (int query = 0; query < queries; ++query) {
      auto& row = scores[query];
      const float best = scale_scores(how, kScaled ? here.key_scales : nullptr, seen, row);
      // A row of NaN has no best score, and stays NaN.
      if (!(best <= top[query])) {
        const float fade = std::exp(top[query] - best);
        sum[query] *= fade;
        for (int d = 0; d < dim; d += kPanel) store(out + query * dim + d, load(out + query * dim + d) * fade);
        top[query] = best;
      }
      sum[query] += weigh_scores(top[query], seen, row);
      for (int i = 0; i < kPageVectors; ++i) {
        if constexpr (kScaled) row[i] = row[i] * load(here.value_scales + i * kPanel);
        store(weights[query] + i * kPanel, row[i]);
      }
    }
    add_values(weights, here.values, next.values, seen.begin, seen.end, dim, out);
  }
  for (int query = 0; query < queries; ++query) {
    if (sinks) sum[query] += std::exp(sinks[query] - top[query]);
    const float share = 1.0f / sum[query];
    for (int d = 0; d < dim; d += kPanel) store(out + query * dim + d, load(out + query * dim + d) * share);
  }
}

static void attend(const Attention& how, const HeadPages& head, const int32_t* pages, int position, int count,
                   const float* sinks, const float* q, float* out) {
  auto all_of = [&]<typename Cell>() {
    auto some = [&]<int queries>() {
      attend_queries<queries, Cell>(how, head, pages, position, sinks, q, out);
      q += queries * how.dim, out += queries * how.dim, count -= queries;
      if (sinks) sinks += queries;
    };
    while (count >= 4) some.template operator()<4>();
    if (count == 3) some.template operator()<3>();
    if (count == 2) some.template operator()<2>();
    if (count == 1) some.template operator()<1>();
  };
  switch (how.cells) {
    case Cells::kFloat: all_of.template operator()<float>(); break;
    case Cells::kHalf: all_of.template operator()<Half>(); break;
    case Cells::kInt8: all_of.template operator()<int8_t>(); break;
  }
}

// Converts to a page's cells; for int8 cells, returns the scale.
inline float to_cells(const float* from, int dim, float* to) { return std::copy(from, from + dim, to), 1.0f; }
inline float to_cells(const float* from, int dim, Half* to) {
  for (int d = 0; d < dim; d += kPanel) store(to + d, load(from + d));
  return 1.0f;
}
inline float to_cells(const float* from, int dim, int8_t* to) {
  Floats most = zeros();
  for (int d = 0; d < dim; d += kPanel) most = max(most, abs(load(from + d)));
  const float peak = largest(most), inverse = peak > 0.0f ? 127.0f / peak : 0.0f;
  for (int d = 0; d < dim; d += kPanel) store_rounded(to + d, load(from + d) * all(inverse));
  return peak / 127.0f;
}

static void keep(const Attention& how, const HeadPages& head, const int32_t* pages, int position, const float* key,
                 const float* value) {
  auto as = [&]<typename Cell>() {
    const int dim = how.dim, slot = position % kPage;
    const HeadPage<Cell> page(head, dim, pages[position / kPage]);
    Cell cells[kMostDim];
    const float key_scale = to_cells(key, dim, cells);
    for (int d = 0; d < dim; ++d) page.keys[d * kPage + slot] = cells[d];
    const float value_scale = to_cells(value, dim, page.values + slot * dim);
    if constexpr (std::is_same_v<Cell, int8_t>)
      page.key_scales[slot] = key_scale, page.value_scales[slot] = value_scale;
  };
  switch (how.cells) {
    case Cells::kFloat: as.template operator()<float>(); break;
    case Cells::kHalf: as.template operator()<Half>(); break;
    case Cells::kInt8: as.template operator()<int8_t>(); break;
  }
}

}  // namespace OSTRO_ISA
