// A solution that is changed value by value: planning/search/changes.py in C++, step by step, so that both have the same bits.
#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "isa.h"

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
        : step_(step), at_(solution), remade_from_(step.values, 0), needs_(step.values), changes_(step.values) {}

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

    void add(int64_t value, int64_t sign) {
        const int64_t row = at_.rows[value];
        const int64_t start = step_.remakes[row] ? at_.makes[value] : step_.born[value];
        const int64_t held = sign * step_.held[row], decode = sign * step_.decode[row];
        if (held)
            for (int64_t* each = at_.live + start; each <= at_.live + at_.last[value]; ++each) *each += held;
        at_.live[start] += sign * step_.at_start[row];
        const double seconds = step_.decode_seconds[row];
        if (!decode && seconds == 0.0) return;
        const int64_t* first = step_.reads + step_.read_starts[value];
        const int64_t* end = step_.reads + step_.read_starts[value + 1];
        int64_t extra = 0;
        for (const auto& need : needs_[value]) {
            if (std::binary_search(first, end, need.first)) continue;
            ++extra;
            at_.live[need.first] += decode;
        }
        at_.seconds += static_cast<double>(sign) * seconds * static_cast<double>(extra);
        if (!decode) return;
        for (const int64_t* read = first; read < end; ++read) at_.live[*read] += decode;
        for (int64_t at = step_.fetch_starts[row]; at < step_.fetch_starts[row + 1]; ++at)
            for (int64_t* each = at_.live + step_.fetches[2 * at]; each < at_.live + step_.fetches[2 * at + 1]; ++each)
                *each += decode;
    }
};

}  // namespace bs

// A search from a solution in which all values are kept. Both structures have to outlive it.
BS_EXPORT bs::Search* bs_search_new(const bs::Step* step, bs::Solution* solution) {
    return new bs::Search(*step, *solution);
}

BS_EXPORT void bs_search_free(bs::Search* search) { delete search; }

// Changes how a value is held. Returns how many values were touched.
BS_EXPORT int64_t bs_search_set(bs::Search* search, int64_t value, int64_t row) { return search->set(value, row); }
