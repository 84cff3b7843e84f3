// What is done to a row of logits over the vocabulary: the draw of a token, and log-probabilities.
//
// `headrace.executors.candidates` says what is drawn. Its filters each keep the first tokens of one order, by falling
// logit and rising id, so what they leave ends at one place of that order. Noise is small as a rule: most tokens are seen
// to lose from a bound on it, and for the others it is computed. Where sums or logarithms decide by less than their
// rounding, the answer is -1, and the reference draws: an id given here is the reference's, on every tier.

#include <algorithm>
#include <cfloat>
#include <vector>

#include "noise.h"
#include "words.h"

namespace headrace {
namespace {

constexpr float kInfinity = INFINITY;
constexpr double kLog2E = 1.4426950408889634;
constexpr double kSlack = 0.01;        // of rarity, for the roundings on the way to it
constexpr double kSureTotal = 1e-9;    // totals are below 40 and rounded a few times
constexpr double kSureMass = 1e-5;     // a mass is a sum of floats, each rounded to 1e-6

float next_above(float x) { return std::nextafter(x, kInfinity); }

// Call visit(first, logits) for each sixteen logits of a row; lanes behind its end are -inf.
template <typename F>
HR_INLINE void each_sixteen(const float* row, int64_t size, F&& visit) {
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) visit(i, load(row + i));
    if (i == size) return;
    int n = int(size - i);
    visit(i, keep(load_first(row + i, n), 0, n, splat(-kInfinity)));
}

// Call visit(lane) for each bit that is set. A bit's place is its logarithm, which is a float's exponent: not every tier
// has the instruction that counts zeros.
template <typename F>
HR_INLINE void each_bit(uint32_t bits, F&& visit) {
    for (; bits; bits &= bits - 1) {
        float lowest = float(int32_t(bits & (~bits + 1)));
        int32_t exponent;
        std::memcpy(&exponent, &lowest, 4);
        visit((exponent >> 23) - 127);
    }
}

// A token in the order of a row.
struct Place {
    float value;
    int32_t id;

    bool operator<(Place other) const { return value > other.value || (value == other.value && id < other.id); }
};

// The first k tokens of a row, the k-th at the end, the others in any order; 0 < k <= size.
std::vector<Place> first_places(const float* row, int64_t size, int64_t k) {
    size_t capacity = size_t(std::min(size, std::max<int64_t>(4 * k, 256)));
    std::vector<Place> places;
    places.reserve(capacity + kLanes);
    float least = -kInfinity;
    auto shrink = [&] {
        std::nth_element(places.begin(), places.begin() + (k - 1), places.end());
        places.resize(size_t(k));
        least = next_above(places.back().value);  // an equal one that comes later is behind
    };
    each_sixteen(row, size, [&](int64_t first, V16 logits) {
        each_bit(at_least(logits, splat(least)), [&](int lane) {
            if (first + lane < size) places.push_back({row[first + lane], int32_t(first + lane)});
        });
        if (places.size() >= capacity) shrink();
    });
    shrink();
    return places;
}

// Sum of e^((logit - top) * scale) over the tokens up to a place.
double mass_until(const float* row, int64_t size, float top, float scale, Place last) {
    float above = next_above(last.value);
    LaneSums sums;
    int64_t equal = 0;
    each_sixteen(row, size, [&](int64_t first, V16 logits) {
        uint32_t lanes = at_least(logits, splat(last.value));
        if (!lanes) return;
        sums.add(zero_below(exp((logits - splat(top)) * splat(scale)), logits, above));
        lanes &= ~at_least(logits, splat(above));
        each_bit(lanes, [&](int lane) { equal += first + lane <= last.id; });
    });
    return sums.total() + (equal ? double(equal) * std::exp(double((last.value - top) * scale)) : 0);
}

// A row that a token is drawn from.
struct Row {
    const float* logits;
    int64_t size;
    int32_t best;  // id of the largest logit
    float top;     // that logit
    double temperature;
    uint64_t key;

    double score(float logit) const { return (double(logit) - double(top)) / temperature; }

    // Sum of e^score over the tokens up to a place.
    double mass(Place last) const { return mass_until(logits, size, top, float(1 / temperature), last); }

    // The last token that min_p keeps: score is monotonous, so it is one logit that divides.
    Place last_above(double log_min_p) const {
        float value = float(double(top) + log_min_p * temperature);
        while (score(value) >= log_min_p) value = std::nextafter(value, -kInfinity);
        while (score(value) < log_min_p) value = next_above(value);
        return {value, int32_t(size)};
    }
};

// The token whose score and noise are the largest so far, and what others would need to win.
class Race {
  public:
    Race(const Row& row, Place last) : row_(row), last_(last) { enter(row.best); }

    // The winner among the tokens up to `last`; -1 where the second is as good within rounding.
    int64_t run() {
        float slope = float(kRarityUnit * kLog2E / row_.temperature);
        each_sixteen(row_.logits, row_.size, [&](int64_t first, V16 logits) {
            uint32_t lanes = at_least(logits, splat(least_));
            if (!lanes) return;
            V16 room = fma(logits - splat(row_.top), splat(slope), splat(room_));
            lanes &= at_least(room, rarity(row_.key, first));
            each_bit(lanes, [&](int lane) {
                int64_t id = first + lane;
                if (id != row_.best && !(last_ < Place{row_.logits[id], int32_t(id)})) enter(id);
            });
        });
        return total_ - second_ > kSureTotal ? id_ : -1;
    }

  private:
    void enter(int64_t id) {
        double total = row_.score(row_.logits[id]) + gumbel(row_.key, id);
        if (total <= total_) {
            second_ = std::max(second_, total);
            return;
        }
        second_ = total_;
        total_ = total;
        id_ = id;
        // -log(u) >= 1 - u: to win, log2(1 - u) must not be above log2(e) (score - total).
        room_ = float(kRarityUnit * (kRarityZero + kSlack - total * kLog2E));
        double least = double(row_.top) + row_.temperature * (total - (kRarest + kSlack) / kLog2E);
        least_ = std::max(last_.value, std::nextafter(float(least), -kInfinity));
    }

    const Row& row_;
    Place last_;
    int64_t id_ = -1;
    double total_ = -kInfinity, second_ = -kInfinity;
    float room_ = 0, least_ = -FLT_MAX;
};

// The winner among the likeliest tokens up to `last` that together reach top_p, the one that crosses it included.
int64_t race_in_nucleus(const Row& row, Place last, double top_p) {
    double whole = row.mass(last);
    double target = top_p * whole, unsure = kSureMass * whole;
    // Tokens so unlikely that even all together they could not fill what is above top_p are not in it.
    double rest = 0.99 * (1 - top_p) * whole / double(row.size);
    if (1 - top_p > 1e-6) {
        float bound = float(double(row.top) + row.temperature * std::log(rest));
        last = std::min(last, Place{std::nextafter(bound, -kInfinity), int32_t(row.size)});
    }
    for (;;) {
        int64_t id = Race(row, last).run();
        if (id < 0 || id == row.best) return id;
        Place before{row.logits[id], int32_t(id - 1)};
        double mass = row.mass(before);
        if (mass < target - unsure) return id;
        if (mass <= target + unsure) return -1;
        last = before;  // it is outside, and so are all behind it
    }
}

int64_t drawn(const Row& row, int64_t top_k, double top_p, double log_min_p) {
    if (row.temperature == 0) return row.best;
    if (!std::isfinite(row.top)) return -1;
    Place last{-FLT_MAX, int32_t(row.size)};
    if (0 < top_k && top_k < row.size) last = std::min(last, first_places(row.logits, row.size, top_k).back());
    if (log_min_p > -kInfinity) last = std::min(last, row.last_above(log_min_p));
    return top_p < 1 ? race_in_nucleus(row, last, top_p) : Race(row, last).run();
}

// logits [m, size]; the others [m].
void draw(const float* logits, int64_t m, int64_t size, const int64_t* best, const int64_t* keys,
          const double* temperature, const int64_t* top_k, const double* top_p, const double* log_min_p, int64_t* ids) {
#pragma omp for schedule(dynamic)
    for (int64_t r = 0; r < m; ++r) {
        const float* row = logits + r * size;
        ids[r] = drawn({row, size, int32_t(best[r]), row[best[r]], temperature[r], uint64_t(keys[r])}, top_k[r],
                       top_p[r], log_min_p[r]);
    }
}

float largest(const float* row, int64_t size) {
    V16 most = splat(-kInfinity);
    each_sixteen(row, size, [&](int64_t, V16 logits) { most = max(logits, most); });
    return max_lanes(most);
}

int64_t rank_of(const float* row, int64_t size, int64_t id) {
    float value = row[id], above = next_above(value);
    V16 larger = zero();  // whole numbers, exact in float
    int64_t equal = 0;
    each_sixteen(row, size, [&](int64_t first, V16 logits) {
        larger = larger + zero_below(splat(1), logits, above);
        if (first >= id) return;
        uint32_t lanes = at_least(logits, splat(value)) & ~at_least(logits, splat(above));
        each_bit(lanes, [&](int lane) { equal += first + lane < id; });
    });
    return int64_t(sum_lanes(larger)) + equal + 1;
}

// logits [m, size], ids [m] -> log of the sum of e^logit [m], rank of the id [m], the k likeliest ids [m, k].
void score(const float* logits, int64_t m, int64_t size, const int64_t* ids, int64_t k, double* totals, int64_t* ranks,
           int64_t* likeliest) {
#pragma omp for schedule(dynamic)
    for (int64_t r = 0; r < m; ++r) {
        const float* row = logits + r * size;
        float top = largest(row, size);
        totals[r] = double(top) + std::log(mass_until(row, size, top, 1.0f, {-FLT_MAX, int32_t(size)}));
        ranks[r] = rank_of(row, size, ids[r]);
        if (k == 0) continue;
        std::vector<Place> places = first_places(row, size, k);
        std::sort(places.begin(), places.end());
        for (int64_t i = 0; i < k; ++i) likeliest[r * k + i] = places[size_t(i)].id;
    }
}

}  // namespace
}  // namespace headrace

HR_KERNEL(draw, headrace::draw)
HR_KERNEL(score, headrace::score)
