// Paged attention. Included once per instruction set.
//
// A query visits the pages of its sequence in order, one page at a time, and keeps a running maximum, so its result
// does not depend on how the prompt was split into chunks, on what else is in the batch, or on how many other queries
// visit the pages with it.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

namespace OSTRO_ISA {

constexpr int kPageVectors = kPage / kPanel;
// Queries of several tokens whose sums are in registers at a time, if these are many: then a query's numbers are
// [dim][query], so that their places are known.
constexpr int kWideQueries = kPanel == 16 ? 12 : 4;
constexpr bool is_wide(int queries) { return queries > 4; }

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
    if constexpr (is_wide(queries)) {
      for (int at = 0; at < 4; ++at) {
        const Lanes<queries> lanes(q + (d + at) * queries);
        for (int i = 0; i < kPageVectors; ++i) {
          const Floats key = load(keys + at * kPage + i * kPanel);
          each_lane<queries>([&]<int query>() OSTRO_BODY {
            sums[query][i] = lanes.template add<query>(sums[query][i], key);
          });
        }
      }
    } else {
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

// Adjacent queries of one head, and what they have seen so far.
struct Visitors {
  const float* q;
  float* out;
  float* top;
  float* sum;

  Visitors from(int query, int dim) const { return {q + query * dim, out + query * dim, top + query, sum + query}; }
};

// All queries of a stretch of tokens. Of the first num_wide there is a copy as kWideQueries have it.
struct Stretch {
  int position, tokens, count;
  const float* q;
  float* out;
  const float* wide;
  int num_wide;

  int queries() const { return tokens * count; }
};

// Some queries visit a page.
template <int queries, typename Cell>
OSTRO_NOINLINE void visit(const Attention& how, const HeadPage<Cell>& here, const HeadPage<Cell>& next, Seen seen,
                          const Visitors& by) {
  constexpr bool kScaled = std::is_same_v<Cell, int8_t>;
  const int dim = how.dim;
  Floats scores[queries][kPageVectors];
  page_scores(by.q, dim, here.keys, next.keys, scores);
  float weights[queries][kPage];
  for (int query = 0; query < queries; ++query) {
    auto& row = scores[query];
    const float best = scale_scores(how, kScaled ? here.key_scales : nullptr, seen, row);
    // A row of NaN has no best score, and stays NaN.
    if (!(best <= by.top[query])) {
      const float fade = std::exp(by.top[query] - best);
      by.sum[query] *= fade;
      float* out = by.out + query * dim;
      for (int d = 0; d < dim; d += kPanel) store(out + d, load(out + d) * fade);
      by.top[query] = best;
    }
    by.sum[query] += weigh_scores(by.top[query], seen, row);
    for (int i = 0; i < kPageVectors; ++i) {
      if constexpr (kScaled) row[i] = row[i] * load(here.value_scales + i * kPanel);
      store(weights[query] + i * kPanel, row[i]);
    }
  }
  add_values(weights, here.values, next.values, seen.begin, seen.end, dim, by.out);
}

// Calls body.operator()<queries>(first) for so many at a time.
template <int queries = 4, typename Body>
inline void each_queries(int begin, int end, const Body& body) {
  for (; begin + queries <= end; begin += queries) body.template operator()<queries>(begin);
  if constexpr (queries > 1)
    if (begin < end) each_queries<queries - 1>(begin, end, body);
}

template <typename Cell>
inline void visit_pages(const Attention& how, const HeadPages& head, const int32_t* pages, const Stretch& stretch,
                        const Visitors& all) {
  const int dim = how.dim, last = stretch.position / kPage, count = stretch.count;
  auto first_seen = [&](int token) {
    return how.window ? std::max(0, stretch.position + token + 1 - how.window) : 0;
  };
  for (int page = first_seen(0) / kPage; page <= last; ++page) {
    const HeadPage<Cell> here(head, dim, pages[page]);
    // Pages are scattered in memory: prefetch the next one while working on this one.
    const HeadPage<Cell> next(head, dim, pages[std::min(page + 1, last)]);
    auto some = [&](int begin, int end, Seen seen) {
      each_queries(begin, end,
                   [&]<int queries>(int i) { visit<queries>(how, here, next, seen, all.from(i, dim)); });
    };
    if (page < last && first_seen(stretch.tokens - 1) <= page * kPage) {
      const Seen seen{0, kPage};
      if constexpr (is_wide(kWideQueries))
        for (int i = 0; i < stretch.num_wide; i += kWideQueries) {
          Visitors wide = all.from(i, dim);
          wide.q = stretch.wide + i * dim;
          visit<kWideQueries>(how, here, next, seen, wide);
        }
      some(stretch.num_wide, stretch.queries(), seen);
      continue;
    }
    for (int token = 0; token < stretch.tokens; ++token) {
      const Seen seen{std::max(0, first_seen(token) - page * kPage),
                      std::min(kPage, stretch.position + token + 1 - page * kPage)};
      if (seen.begin < seen.end) some(token * count, (token + 1) * count, seen);
    }
  }
}

static void attend_stretch(const Attention& how, const HeadPages& head, const int32_t* pages, const float* sinks,
                           const Stretch& stretch) {
  const int dim = how.dim, queries = stretch.queries();
  float top[kQueries], sum[kQueries];
  std::fill_n(top, queries, -INFINITY);
  std::fill_n(sum, queries, 0.0f);
  std::fill_n(stretch.out, queries * dim, 0.0f);
  const Visitors all{stretch.q, stretch.out, top, sum};
  switch (how.cells) {
    case Cells::kFloat: visit_pages<float>(how, head, pages, stretch, all); break;
    case Cells::kHalf: visit_pages<Half>(how, head, pages, stretch, all); break;
    case Cells::kInt8: visit_pages<int8_t>(how, head, pages, stretch, all); break;
  }
  for (int query = 0; query < queries; ++query) {
    if (sinks) sum[query] += std::exp(sinks[query % stretch.count] - top[query]);
    const float share = 1.0f / sum[query];
    float* out = stretch.out + query * dim;
    for (int d = 0; d < dim; d += kPanel) store(out + d, load(out + d) * share);
  }
}

static void attend(const Attention& how, const HeadPages& head, const int32_t* pages, int position, int tokens,
                   int count, const float* sinks, const float* q, long stride, float* out, long out_stride) {
  const int dim = how.dim, width = count * dim;
  if (tokens == 1) {
    for (int i = 0; i < count; i += kQueries)
      attend_stretch(how, head, pages, sinks ? sinks + i : nullptr,
                     {position, 1, std::min(kQueries, count - i), q + i * dim, out + i * dim, nullptr, 0});
    return;
  }
  alignas(64) float all_q[kQueries * kMostDim], all_out[kQueries * kMostDim], wide[kQueries * kMostDim];
  for (int token = 0; token < tokens; ++token) std::copy_n(q + token * stride, width, all_q + token * width);
  const int num_wide = is_wide(kWideQueries) ? tokens * count / kWideQueries * kWideQueries : 0;
  for (int i = 0; i < num_wide; ++i)
    for (int d = 0; d < dim; ++d)
      wide[i / kWideQueries * kWideQueries * dim + d * kWideQueries + i % kWideQueries] = all_q[i * dim + d];
  attend_stretch(how, head, pages, sinks, {position, tokens, count, all_q, all_out, wide, num_wide});
  for (int token = 0; token < tokens; ++token) std::copy_n(all_out + token * width, width, out + token * out_stride);
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
