// A solution that is changed value by value: planning/search/changes.py and moves.py in C++, step by step, so that both have
// the same bits.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "isa.h"

#define BS_KERNELS "search_kernels.h"
#include "foreach_isa.h"

namespace bs {

// A step as planning/model/peak.py has it. Rows are the choices of all values; lists begin where `..._starts` says.
struct Step {
    int64_t values;
    const int64_t* rank;  // of each value: children come before what they are remade from
    const int64_t* born;
    const int64_t* first_read;
    const int64_t* last_read;
    const int64_t* read_starts;
    const int64_t* reads;
    const int64_t* parent_starts;  // by row
    const int64_t* parents;
    const int64_t* fetch_starts;  // by row
    const int64_t* fetches;       // pairs of positions, the end excluded
    const int64_t* remakes;       // by row
    const int64_t* has_error;
    const int64_t* held;
    const int64_t* at_start;
    const int64_t* decode;
    const double* decode_seconds;
    const double* own_seconds;
    const double* errors;
    int64_t positions;
    int64_t rows;
    const int64_t* first;  // by value, its first row, and then the number of rows
    const int64_t* value_of;
    const int64_t* nbytes;
    const int64_t* alike;  // by row, equal for the same choice of equal values in repeated layers
    int64_t blocks;
    const int64_t* block_starts;  // and then the number of positions
};

// What a move may do and has done (planning/search/moves.py).
struct Effort {
    double work;
    double end;
    double limit;  // of the sum of squares of errors
    double price;  // seconds for each unit of that sum
};

// What is known of a solution. The arrays are the caller's.
struct Solution {
    int64_t* rows;
    int64_t* live;
    int64_t* makes;
    int64_t* last;
    double seconds;
    double error;
    int64_t conflicts;
};

class Search {
public:
    Search(const Step& step, Solution& solution)
        : step_(step),
          at_(solution),
          remade_from_(step.values, 0),
          needs_(step.values),
          changes_(step.values),
          block_of_(step.positions),
          block_most_(step.blocks),
          block_more_(step.blocks, 0) {
        for (int64_t block = 0; block < step.blocks; ++block) {
            const int64_t first = step.block_starts[block], end = step.block_starts[block + 1];
            std::fill(block_of_.begin() + first, block_of_.begin() + end, block);
            block_most_[block] = BS_PICK(most_of)(at_.live + first, end - first);
        }
    }

    // Adds to the positions of each block what was added to all of them. Whoever reads `live` calls this before.
    void flush() {
        for (int64_t block = 0; block < step_.blocks; ++block) {
            if (!block_more_[block]) continue;
            BS_PICK(add_bytes)(at_.live, step_.block_starts[block], step_.block_starts[block + 1], block_more_[block]);
            block_more_[block] = 0;
        }
    }

    void load(const int64_t* rows) {
        for (int64_t value = 0; value < step_.values; ++value)
            if (at_.rows[value] != rows[value]) set(value, rows[value]);
    }

    // Moves.set_all
    void set_all(const int64_t* values, const int64_t* rows, int64_t count, Effort& effort) {
        for (int64_t at = 0; at < count; ++at) {
            const int64_t value = values[at], old = at_.rows[value];
            if (rows[at] == old) continue;
            charge(effort, set(value, rows[at]));
            if (!keeps(effort.limit)) charge(effort, set(value, old));
        }
    }

    // Moves.lower
    bool lower(int64_t level, double tau, int64_t batch, Effort& effort) {
        std::vector<char> refused(step_.rows, 0);
        std::vector<int64_t> changed(step_.values, 0);  // in which round a value was changed last
        double peak = smooth(tau, effort);
        for (int64_t round = 1; most() > level; ++round) {
            if (effort.work > effort.end || round > 2 * step_.values + 50) return false;
            make_offers(tau, effort);
            for (int64_t row = 0; row < step_.rows; ++row)
                if (refused[row]) freed_[row] = 0.0;
            order(batch);
            if (tried_.empty()) return false;
            int64_t count = 0;
            for (const int64_t row : tried_) {
                const int64_t value = step_.value_of[row];
                if (changed[value] == round) continue;
                const int64_t old = at_.rows[value];
                charge(effort, set(value, row));
                const double now = smooth(tau, effort);
                if (now < peak - 0.001 * tau && keeps(effort.limit)) {
                    peak = now;
                    changed[value] = round;
                    if (++count >= batch || most() <= level) break;
                } else {
                    charge(effort, set(value, old));
                    refused[row] = 1;
                }
            }
            if (count) std::fill(refused.begin(), refused.end(), 0);
        }
        return true;
    }

    // Moves.relax
    void relax(int64_t level, Effort& effort) {
        effort.work += 1.0 + 0.02 * static_cast<double>(step_.positions);
        flush();
        const std::vector<int64_t> most_before = most_before_made();
        std::vector<int64_t> active;
        for (int64_t value = 0; value < step_.values; ++value)
            if (at_.rows[value] != step_.first[value] && level - most_before[value] > 0) active.push_back(value);
        const double* own = step_.own_seconds;
        std::vector<double> costs(step_.values);
        for (const int64_t value : active) costs[value] = own[at_.rows[value]];
        std::stable_sort(active.begin(), active.end(), [&](int64_t a, int64_t b) { return costs[a] > costs[b]; });
        std::vector<int64_t> faster;
        for (const int64_t value : active) {
            if (effort.work > effort.end) return;
            const int64_t old = at_.rows[value], held = step_.remakes[old] ? 0 : step_.held[old];
            const int64_t slack = level - most_before[value];
            faster.clear();
            for (int64_t row = step_.first[value]; row < step_.first[value + 1]; ++row)
                if (own[row] < own[old]) faster.push_back(row);
            std::stable_sort(faster.begin(), faster.end(), [&](int64_t a, int64_t b) { return own[a] < own[b]; });
            for (const int64_t row : faster) {
                if (!step_.remakes[row] && step_.held[row] - held > slack) continue;
                const double before = at_.seconds;
                charge(effort, set(value, row));
                if (at_.seconds < before && most() <= level && keeps(effort.limit)) break;
                charge(effort, set(value, old));
            }
        }
    }

    int64_t set(int64_t value, int64_t row) {
        const int64_t old = at_.rows[value];
        add(value, -1);
        at_.seconds += step_.own_seconds[row] - step_.own_seconds[old];
        at_.error += step_.errors[row] - step_.errors[old];
        at_.conflicts += (step_.has_error[row] - step_.has_error[old]) * remade_from_[value];
        const int64_t made = at_.makes[value];
        note_children(old, made, -1);
        at_.rows[value] = row;
        note_children(row, made, 1);
        add(value, 1);
        return 1 + propagate();
    }

private:
    using Changes = std::vector<std::pair<int64_t, int64_t>>;  // positions, and how many children more are made there

    const Step& step_;
    Solution& at_;
    std::vector<int64_t> remade_from_;
    std::vector<std::map<int64_t, int64_t>> needs_;  // children made there, by position
    std::vector<Changes> changes_;
    std::vector<std::pair<int64_t, int64_t>> waiting_;  // a heap of ranks and values, the least rank first
    std::vector<int64_t> tried_, block_of_;
    std::vector<int64_t> block_most_;  // the most bytes in each block
    std::vector<int64_t> block_more_;  // what is yet to be added to all positions of a block
    std::vector<double> weights_, prices_, sums_, cost_, freed_, seconds_, score_, together_, of_alike_, read_prices_;

    void charge(Effort& effort, int64_t touched) const {
        effort.work += 0.5 + (0.25 + 0.0005 * static_cast<double>(step_.blocks)) * static_cast<double>(touched);
    }

    bool keeps(double limit) const { return !at_.conflicts && at_.error <= limit * (1 + 1e-9) + 1e-30; }

    int64_t most() const { return BS_PICK(most_of)(block_most_.data(), step_.blocks); }

    double smooth(double tau, Effort& effort) {
        effort.work += 0.5 + 0.003 * static_cast<double>(step_.blocks);
        weights_.resize(step_.blocks);
        const double top = static_cast<double>(most());
        BS_PICK(weigh)(block_most_.data(), step_.blocks, top, tau, weights_.data());
        double sum = 0.0;
        for (const double each : weights_) sum += each;
        return top + tau * std::log(sum);
    }

    // Offers.make in offers.py
    void make_offers(double tau, Effort& effort) {
        const int64_t rows = step_.rows, positions = step_.positions;
        effort.work += 2.0 + 0.02 * static_cast<double>(rows) + 0.006 * static_cast<double>(positions);
        flush();
        prices_.resize(positions);
        sums_.resize(positions + 1);
        const double top = static_cast<double>(most());
        BS_PICK(weigh)(at_.live, positions, top, tau, prices_.data());
        sums_[0] = 0.0;
        for (int64_t at = 0; at < positions; ++at) sums_[at + 1] = sums_[at] + prices_[at];
        read_prices_.resize(step_.values);
        for (int64_t value = 0; value < step_.values; ++value) {
            double sum = 0.0;
            for (int64_t at = step_.read_starts[value]; at < step_.read_starts[value + 1]; ++at) sum += prices_[step_.reads[at]];
            read_prices_[value] = sum;
        }
        cost_.resize(rows);
        freed_.resize(rows);
        seconds_.resize(rows);
        for (int64_t row = 0; row < rows; ++row) {
            const int64_t value = step_.value_of[row];
            const int64_t start = step_.remakes[row] ? at_.makes[value] : step_.born[value];
            const double decode = static_cast<double>(step_.decode[row]);
            double cost = static_cast<double>(step_.held[row]) * (sums_[at_.last[value] + 1] - sums_[start]);
            cost += static_cast<double>(step_.at_start[row]) * prices_[start];
            cost += decode * read_prices_[value];
            double fetched = 0.0;
            for (int64_t at = step_.fetch_starts[row]; at < step_.fetch_starts[row + 1]; ++at)
                fetched += decode * (sums_[step_.fetches[2 * at + 1]] - sums_[step_.fetches[2 * at]]);
            cost += fetched;
            double effects = 0.0, more = 0.0;
            const int64_t made = at_.makes[value];
            for (int64_t at = step_.parent_starts[row]; at < step_.parent_starts[row + 1]; ++at) {
                const int64_t parent = step_.parents[at], its = at_.rows[parent];
                double effect = static_cast<double>(step_.held[its]) * std::max(0.0, sums_[made + 1] - sums_[at_.last[parent] + 1]);
                const double earlier = std::max(0.0, sums_[at_.makes[parent]] - sums_[made]);
                effect += step_.remakes[its] ? static_cast<double>(step_.nbytes[parent]) * earlier : 0.0;
                effect += static_cast<double>(step_.decode[its]) * prices_[made];
                effects += effect;
                more += step_.decode_seconds[its];
            }
            cost_[row] = cost + effects;
            seconds_[row] = step_.own_seconds[row] - step_.own_seconds[at_.rows[value]] + more;
        }
        for (int64_t row = 0; row < rows; ++row) {
            const int64_t chosen = at_.rows[step_.value_of[row]];
            freed_[row] = row == chosen ? 0.0 : cost_[chosen] - cost_[row];
            seconds_[row] += (step_.errors[row] - step_.errors[chosen]) * effort.price;
            seconds_[row] = std::max(seconds_[row], 1e-6);
        }
    }

    // Puts the rows to try into `tried_`, best first. In a large batch, equal choices of repeated layers come together.
    void order(int64_t batch) {
        tried_.clear();
        score_.resize(step_.rows);
        double best = 0.0;
        for (int64_t row = 0; row < step_.rows; ++row) {
            if (!(freed_[row] > 0.0)) continue;
            tried_.push_back(row);
            score_[row] = freed_[row] / seconds_[row];
            best = std::max(best, score_[row]);
        }
        if (batch > 1) {
            together_.assign(step_.rows, 0.0);
            of_alike_.assign(step_.rows, 0.0);
            for (const int64_t row : tried_) {
                together_[step_.alike[row]] += freed_[row];
                of_alike_[step_.alike[row]] += seconds_[row];
            }
            for (const int64_t row : tried_) {
                const double shared = together_[step_.alike[row]] / std::max(of_alike_[step_.alike[row]], 1e-9);
                score_[row] = shared * (1.0 + 1e-6 * score_[row] / std::max(best, 1e-30));
            }
        }
        const auto count = std::min<int64_t>(8 * batch, static_cast<int64_t>(tried_.size()));
        std::partial_sort(tried_.begin(), tried_.begin() + count, tried_.end(), [&](int64_t a, int64_t b) {
            return score_[a] != score_[b] ? score_[a] > score_[b] : a < b;
        });
        tried_.resize(count);
    }

    // The most bytes from each value's birth until it would be made again.
    std::vector<int64_t> most_before_made() const {
        std::vector<std::vector<int64_t>> tables(1, std::vector<int64_t>(at_.live, at_.live + step_.positions));
        for (int64_t half = 1; 2 * half <= step_.positions; half *= 2) {
            const auto& last = tables.back();
            std::vector<int64_t> next(last.size() - half);
            for (size_t at = 0; at < next.size(); ++at) next[at] = std::max(last[at], last[at + half]);
            tables.push_back(std::move(next));
        }
        std::vector<int64_t> found(step_.values);
        for (int64_t value = 0; value < step_.values; ++value) {
            const int64_t first = step_.born[value], last = std::max(first, at_.makes[value] - 1);
            int64_t power = 0;
            while (int64_t{2} << power <= last - first + 1) ++power;
            found[value] = std::max(tables[power][first], tables[power][last + 1 - (int64_t{1} << power)]);
        }
        return found;
    }

    void push(int64_t value) {
        waiting_.emplace_back(-step_.rank[value], value);
        std::push_heap(waiting_.begin(), waiting_.end());
    }

    void change(int64_t value, int64_t position, int64_t count) {
        if (changes_[value].empty()) push(value);
        changes_[value].emplace_back(position, count);
    }

    void note_children(int64_t row, int64_t made, int64_t count) {
        if (!step_.remakes[row]) return;
        for (int64_t at = step_.parent_starts[row]; at < step_.parent_starts[row + 1]; ++at) {
            const int64_t parent = step_.parents[at];
            remade_from_[parent] += count;
            at_.conflicts += count * step_.has_error[at_.rows[parent]];
            change(parent, made, count);
        }
    }

    // Moves the needs of values, and of what they are remade from. Returns how many values were touched.
    int64_t propagate() {
        int64_t count = 0;
        while (!waiting_.empty()) {  // children before what they are remade from, so that each is touched once
            std::pop_heap(waiting_.begin(), waiting_.end());
            const int64_t value = waiting_.back().second;
            waiting_.pop_back();
            ++count;
            add(value, -1);
            auto& needs = needs_[value];
            const int64_t before = at_.makes[value];
            for (const auto& [position, more] : changes_[value]) {
                const auto found = needs.emplace(position, 0).first;
                found->second += more;
                if (!found->second) needs.erase(found);
            }
            changes_[value].clear();
            int64_t last = step_.last_read[value], now = step_.first_read[value];
            if (!needs.empty()) {
                last = std::max(last, needs.rbegin()->first);
                now = std::min(now, needs.begin()->first);
            }
            at_.last[value] = last;
            at_.makes[value] = now;
            const int64_t row = at_.rows[value];
            if (now != before && step_.remakes[row]) {
                for (int64_t at = step_.parent_starts[row]; at < step_.parent_starts[row + 1]; ++at) {
                    change(step_.parents[at], before, -1);
                    change(step_.parents[at], now, 1);
                }
            }
            add(value, 1);
        }
        return count;
    }

    // Adds bytes to the positions [from, to).
    void add_bytes(int64_t from, int64_t to, int64_t nbytes) {
        if (from >= to) return;
        const int64_t first = block_of_[from], last = block_of_[to - 1];
        const int64_t whole = first + (from != step_.block_starts[first]);           // the first block that is in it
        const int64_t end = last + (to == step_.block_starts[last + 1]);             // and the first one behind it
        if (whole < end) {
            BS_PICK(add_bytes)(block_more_.data(), whole, end, nbytes);
            BS_PICK(add_bytes)(block_most_.data(), whole, end, nbytes);
        }
        if (first < whole) add_inside(first, from, std::min(to, step_.block_starts[first + 1]), nbytes);
        if (last >= end && last >= whole) add_inside(last, std::max(from, step_.block_starts[last]), to, nbytes);
    }

    void add_inside(int64_t block, int64_t from, int64_t to, int64_t nbytes) {
        const int64_t first = step_.block_starts[block];
        for (int64_t at = from; at < to; ++at) at_.live[at] += nbytes;
        block_most_[block] = block_more_[block] + BS_PICK(most_of)(at_.live + first, step_.block_starts[block + 1] - first);
    }

    void add(int64_t value, int64_t sign) {
        const int64_t row = at_.rows[value];
        const int64_t start = step_.remakes[row] ? at_.makes[value] : step_.born[value];
        const int64_t held = sign * step_.held[row], decode = sign * step_.decode[row];
        if (held) add_bytes(start, at_.last[value] + 1, held);
        if (step_.at_start[row]) add_bytes(start, start + 1, sign * step_.at_start[row]);
        const double seconds = step_.decode_seconds[row];
        if (!decode && seconds == 0.0) return;
        const int64_t* first = step_.reads + step_.read_starts[value];
        const int64_t* end = step_.reads + step_.read_starts[value + 1];
        int64_t extra = 0;
        for (const auto& need : needs_[value]) {
            if (std::binary_search(first, end, need.first)) continue;
            ++extra;
            if (decode) add_bytes(need.first, need.first + 1, decode);
        }
        at_.seconds += static_cast<double>(sign) * seconds * static_cast<double>(extra);
        if (!decode) return;
        for (const int64_t* read = first; read < end; ++read) add_bytes(*read, *read + 1, decode);
        for (int64_t at = step_.fetch_starts[row]; at < step_.fetch_starts[row + 1]; ++at)
            add_bytes(step_.fetches[2 * at], step_.fetches[2 * at + 1], decode);
    }
};

}  // namespace bs

// A search from a solution in which all values are kept. Both structures have to outlive it.
BS_EXPORT bs::Search* bs_search_new(const bs::Step* step, bs::Solution* solution) {
    return new bs::Search(*step, *solution);
}

BS_EXPORT void bs_search_free(bs::Search* search) { delete search; }

// Changes how a value is held. Returns how many values were touched.
BS_EXPORT int64_t bs_search_set(bs::Search* search, int64_t value, int64_t row) {
    const int64_t touched = search->set(value, row);
    search->flush();
    return touched;
}

// Changes whatever differs from the given rows, of which there is one for each value.
BS_EXPORT void bs_search_load(bs::Search* search, const int64_t* rows) {
    search->load(rows);
    search->flush();
}

// The moves of planning/search/moves.py. What they take is added to `effort->work`.
BS_EXPORT void bs_search_set_all(bs::Search* search, const int64_t* values, const int64_t* rows, int64_t count,
                                 bs::Effort* effort) {
    search->set_all(values, rows, count, *effort);
    search->flush();
}

BS_EXPORT int64_t bs_search_lower(bs::Search* search, int64_t level, double tau, int64_t batch, bs::Effort* effort) {
    const bool is_lowered = search->lower(level, tau, batch, *effort);
    search->flush();
    return is_lowered;
}

BS_EXPORT void bs_search_relax(bs::Search* search, int64_t level, bs::Effort* effort) {
    search->relax(level, *effort);
    search->flush();
}
