// Estimates of what a compiled graph holds at each operator: compile/budget/lifetimes.py in C++, step by step.
//
// A value has a number below `count`; the planes of an encoded value are `count` above it, and an encoded image as one
// call decodes it is twice `count` above. Everything of the reference that is a set is a list without repeats here.
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "isa.h"

namespace bs {

enum Fact : uint32_t {
    GRADIENT = 1,
    FORWARD = 2,
    INPUT = 4,
    FUSES = 8,
    READS_FUSED = 16,
    SHARED = 32,
    IMAGE = 64,
    HEAVY = 128,
    LIGHT = 256,
    PART = 512,
    STORED = 1024,
    MUST_BE_SAVED = 2048,
    RESULT = 4096,
    GRADIENT_RESULT = 8192,
};

// A joint graph, as compile/budget/joint.py has it. Absent numbers and bytes are -1.
struct Graph {
    int64_t count;
    const int64_t* starts;  // where the reads of each value begin in `reads`, and the end of all
    const int64_t* reads;
    const uint32_t* facts;
    const int64_t* nbytes;
    const int64_t* scratch;
    const int64_t* in_rows;
    const int64_t* copied;
    const int64_t* takes_over;
    const int64_t* rounded;
    const int64_t* tests;
    int64_t compiler_fuses;
    int64_t counts_on_it;
    int64_t saves_copies;
    int64_t is_on_cpu;
    int64_t least_nbytes;  // of what a kernel does not compute for itself
    int64_t most_reads;    // of an elementwise result that is not stored

    bool is(int64_t number, uint32_t fact) const { return (facts[number] & fact) != 0; }
    const int64_t* begin(int64_t number) const { return reads + starts[number]; }
    const int64_t* end(int64_t number) const { return reads + starts[number + 1]; }
};

using Numbers = std::vector<int64_t>;

// The lifetimes of one pass.
class Pass {
public:
    Numbers born, dies, nbytes;
    int64_t moment = 0;

    Pass(const Graph& graph, bool is_repeated)
        : born(3 * graph.count, -1),
          dies(3 * graph.count, -1),
          nbytes(3 * graph.count, 0),
          graph_(graph),
          is_repeated_(is_repeated),
          stored_(graph.count, 0),
          needed_(3 * graph.count, 0),
          encoded_(graph.count, 0),
          heavy_(graph.count, 0),
          has_touches_(graph.count, 0),
          touches_(graph.count),
          fused_reads_(graph.count),
          outcomes_(graph.count, -1),
          seen_(3 * graph.count, 0) {}

    void store_result(int64_t number) { stored_[number] = 1; }

    void hold(int64_t number, int64_t size) {
        born[number] = dies[number] = moment;
        nbytes[number] = size;
    }

    void planes(int64_t number, int64_t size) {
        if (born[number] >= 0) return;
        born[number] = dies[number] = 0;
        nbytes[number] = size;
    }

    void encoded(int64_t number, int64_t planes) {
        touches_[number].assign(1, planes);
        has_touches_[number] = encoded_[number] = 1;
    }

    void outcome(int64_t number, int64_t planes) { outcomes_[number] = planes; }

    void decode(int64_t number) {
        ++moment;
        store(number);
    }

    void compute(int64_t number) {
        const int64_t *first = graph_.begin(number), *last = graph_.end(number);
        if (graph_.is(number, PART) && born[*first] >= 0) {  // it is there when the call returns
            hold(number, graph_.nbytes[number]);
            born[number] = dies[number] = born[*first];
            return;
        }
        ++moment;
        ++turn_;
        Numbers touched;
        const bool fused = graph_.is(number, READS_FUSED);
        bool is_heavy = graph_.is(number, HEAVY);
        const int64_t outcome = outcomes_[number];
        if (outcome >= 0) touch(touched, outcome);
        if (!fused && std::any_of(first, last, [&](int64_t source) { return encoded_[source] != 0; }))
            store_before(first, last);
        for (const int64_t* at = first; outcome < 0 && at < last; ++at) {
            const int64_t source = *at;
            if (born[source] >= 0) {
                touch(touched, source);
                if (graph_.copied[source] >= 0 && !fused && nbytes[source] == 0)
                    copy(graph_.copied[source]);
            } else if (encoded_[source] && graph_.is(source, IMAGE) && fused) {
                touch(touched, decoded(source));
            } else if (fused) {
                for (int64_t each : touches_[source]) touch(touched, each);
                is_heavy = is_heavy || heavy_[source];
            } else if (encoded_[source]) {  // it is decoded for each reader
                for (int64_t each : touches_[source]) touch(touched, each);
                copy(graph_.nbytes[source]);
            } else {
                store(source);
                touch(touched, source);
            }
        }
        read(touched, fused);
        int64_t scratch = graph_.scratch[number];
        const int64_t images = graph_.in_rows[number];
        if (images >= 0 && !has_touches_[images]) scratch += graph_.nbytes[images];
        if (scratch) copy(scratch);
        if (!graph_.is(number, FUSES)) {
            hold(number, graph_.nbytes[number]);
            if (graph_.takes_over[number] >= 0) births_.push_back({number, true});
            return;
        }
        touches_[number] = std::move(touched);
        has_touches_[number] = 1;
        const bool is_many = static_cast<int64_t>(touches_[number].size()) > graph_.most_reads;
        const bool is_stored = stored_[number] || graph_.is(number, STORED);
        if ((graph_.is(number, SHARED) && (is_heavy || is_many)) || is_stored) {
            store(number);
            needed_[number] |= is_stored;
        } else if (is_heavy) {
            heavy_[number] = 1;
        }
    }

    // Bytes at each operator, of which `kept` are held until the end.
    std::vector<double> finish(const Numbers& kept) {
        for (int64_t number : kept) {
            if (born[number] < 0 && number < graph_.count && has_touches_[number]) store(number);
            if (born[number] >= 0) {
                dies[number] = moment;
                needed_[number] = 1;
            }
        }
        repeat();
        Numbers changes(moment + 2, 0);
        for (size_t number = 0; number < born.size(); ++number) {
            if (born[number] < 0) continue;
            changes[born[number]] += nbytes[number];
            changes[dies[number] + 1] -= nbytes[number];
        }
        copies_.resize(moment + 1, 0);
        Numbers found(moment + 1);
        int64_t alive = 0;
        for (int64_t at = 0; at <= moment; ++at) {
            alive += changes[at];
            found[at] = alive + copies_[at];
        }
        take_over(found);
        return {found.begin(), found.end()};
    }

private:
    const Graph& graph_;
    bool is_repeated_;
    std::vector<char> stored_, needed_, encoded_, heavy_, has_touches_;
    std::vector<Numbers> touches_, fused_reads_;
    Numbers outcomes_, seen_, copies_;
    std::vector<std::pair<int64_t, bool>> births_;  // and whether the one candidate is the summand that it takes over
    int64_t turn_ = 0;

    void touch(Numbers& touched, int64_t number) {
        if (seen_[number] == turn_) return;
        seen_[number] = turn_;
        touched.push_back(number);
    }

    void copy(int64_t size) {
        if (static_cast<int64_t>(copies_.size()) <= moment) copies_.resize(moment + 1, 0);
        copies_[moment] += size;
    }

    // What an operator reads beside an encoded value is there when that is decoded.
    void store_before(const int64_t* first, const int64_t* last) {
        bool any = false;
        Numbers absent;
        for (const int64_t* at = first; at < last; ++at)
            if (born[*at] < 0 && !encoded_[*at]) absent.push_back(*at);
        for (int64_t source : absent) {
            store(source);
            any = true;
        }
        moment += any;
    }

    int64_t decoded(int64_t source) {
        const int64_t number = 2 * graph_.count + source;
        if (born[number] < 0) {
            read(touches_[source], false);
            hold(number, graph_.nbytes[source]);
        }
        return number;
    }

    void store(int64_t number) {
        read(touches_[number], true);
        hold(number, graph_.nbytes[number]);
        births_.push_back({number, false});
    }

    void read(const Numbers& touched, bool is_fused) {
        for (int64_t source : touched) {
            const bool is_value = source < graph_.count;
            if (is_fused && is_repeated_ && is_value && has_touches_[source] && graph_.is(source, LIGHT)) {
                fused_reads_[source].push_back(moment);
            } else {
                dies[source] = moment;
                needed_[source] = 1;
            }
        }
    }

    // Ends lifetimes where later kernels compute the value for themselves, from what is there anyway.
    void repeat() {
        for (int64_t number = 0; number < graph_.count; ++number) {
            if (fused_reads_[number].empty()) continue;
            int64_t until = moment;
            bool any = false, is_decoded = false;
            for (int64_t each : touches_[number]) {
                is_decoded = is_decoded || each >= graph_.count;
                if (nbytes[each] < graph_.least_nbytes) continue;
                until = any ? std::min(until, dies[each]) : dies[each];
                any = true;
            }
            if (is_decoded) until = -1;  // it is not decoded twice
            bool is_late = false;
            for (int64_t at : fused_reads_[number]) {
                if (at <= until) continue;
                dies[number] = std::max(dies[number], at);
                is_late = true;
            }
            if (!is_late && !needed_[number]) nbytes[number] = 0;  // every kernel that reads it computes it
        }
    }

    // A fused kernel writes over an input that nobody else reads.
    void take_over(Numbers& found) {
        std::vector<char> taken(born.size(), 0);
        for (const auto& [number, is_sum] : births_) {
            const int64_t at = born[number], size = nbytes[number], summand = graph_.takes_over[number];
            const int64_t latest = summand >= 0 ? at : at - 1;
            Numbers touched = is_sum ? Numbers{summand} : touches_[number];
            std::sort(touched.begin(), touched.end());
            for (int64_t source : touched) {
                if (taken[source] || nbytes[source] != size || dies[source] != at || born[source] > latest) continue;
                taken[source] = 1;
                found[at] -= size;
                break;
            }
        }
    }
};

// What backward reads of what was saved, and what it computes again.
struct Needs {
    Numbers used, held;  // in the order in which they are found; bytes by number, -1 for what is not used
    Numbers again;
    std::vector<char> inputs;
};

int64_t held_nbytes(const Graph& graph, const int64_t* saved, int64_t number) {
    if (graph.is(number, INPUT)) return -1;
    return saved[number] < 0 && graph.is(number, MUST_BE_SAVED) ? graph.nbytes[number] : saved[number];
}

std::vector<double> backward(const Graph& graph, const int64_t* saved, Needs& needs) {
    Pass pass(graph, graph.counts_on_it);
    const int64_t count = graph.count;
    std::vector<char> ready(count, 0);
    needs.held.assign(count, -1);
    needs.inputs.assign(count, 0);
    Numbers ends, kept, order;
    for (int64_t number = 0; number < count; ++number)
        if (graph.is(number, GRADIENT) && !graph.is(number, INPUT)) order.push_back(number);
    for (int64_t number = 0; number < count; ++number)
        if (graph.is(number, GRADIENT_RESULT)) kept.push_back(number);
    order.insert(order.end(), kept.begin(), kept.end());
    auto use = [&](int64_t number, int64_t size) {
        if (needs.held[number] < 0) needs.used.push_back(number);
        needs.held[number] = size;
    };
    Numbers needed, waiting;
    for (int64_t number : order) {
        needed.clear();
        waiting.assign(1, number);
        while (!waiting.empty()) {
            const int64_t each = waiting.back();
            waiting.pop_back();
            if (ready[each]) continue;
            ready[each] = 1;
            const int64_t tested = graph.tests[each];
            const bool is_gradient = graph.is(each, GRADIENT);
            if (!is_gradient && tested >= 0 && saved[tested] >= 0 && saved[tested] == graph.rounded[tested]) {
                needed.push_back(each);
                use(tested, saved[tested]);
                pass.planes(count + tested, saved[tested]);
                pass.outcome(each, count + tested);
                continue;
            }
            const int64_t held = is_gradient ? -1 : held_nbytes(graph, saved, each);
            if (held < 0) {
                needed.push_back(each);
                waiting.insert(waiting.end(), graph.begin(each), graph.end(each));
                continue;
            }
            use(each, held);
            if (held == graph.nbytes[each]) {
                pass.born[each] = pass.dies[each] = 0;
                pass.nbytes[each] = held;
                continue;
            }
            pass.planes(count + each, held);
            pass.encoded(each, count + each);
            if (!graph.compiler_fuses) pass.decode(each);
        }
        std::sort(needed.begin(), needed.end());
        for (int64_t each : needed) {
            if (graph.is(each, INPUT)) {
                const int64_t size = graph.saves_copies ? graph.copied[each] : -1;
                needs.inputs[each] = 1;
                pass.hold(each, std::max<int64_t>(size, 0));
                if (size >= 0) pass.born[each] = 0;
                continue;
            }
            pass.compute(each);
            if (graph.is(each, FORWARD) && !graph.is(each, GRADIENT)) needs.again.push_back(each);
        }
        ends.push_back(pass.moment + 1);
    }
    const std::vector<double> found = pass.finish(kept);
    std::sort(ends.begin(), ends.end());
    ends.erase(std::unique(ends.begin(), ends.end()), ends.end());
    Numbers bounds(1, 0);
    for (int64_t end : ends)
        if (end < static_cast<int64_t>(found.size()) && end > 0) bounds.push_back(end);
    bounds.push_back(static_cast<int64_t>(found.size()));
    std::vector<double> most;
    for (size_t at = 0; at + 1 < bounds.size(); ++at)
        most.push_back(*std::max_element(found.begin() + bounds[at], found.begin() + bounds[at + 1]));
    return most;
}

std::vector<double> forward(const Graph& graph, const Needs& needs) {
    const int64_t count = graph.count;
    std::vector<char> runs(count, 0), seen(count, 0);
    Numbers waiting;
    for (int64_t number = 0; number < count; ++number)
        runs[number] = graph.is(number, FORWARD) && !graph.is(number, INPUT);
    for (int64_t number : needs.used)
        if (!graph.is(number, FORWARD)) waiting.push_back(number);
    while (!waiting.empty()) {
        const int64_t number = waiting.back();
        waiting.pop_back();
        if (seen[number]) continue;
        seen[number] = 1;
        if (!graph.is(number, INPUT)) runs[number] = 1;
        waiting.insert(waiting.end(), graph.begin(number), graph.end(number));
    }
    Pass pass(graph, false);
    Numbers kept, planes;
    for (int64_t number : needs.used) {
        const int64_t held = needs.held[number];
        const bool is_plain = held == graph.nbytes[number];
        const bool is_by_kernel = graph.is_on_cpu && held == graph.rounded[number] && graph.is(number, FORWARD);
        if (is_plain || is_by_kernel) pass.store_result(number);
        (is_plain ? kept : planes).push_back(is_plain ? number : count + number);
    }
    for (int64_t number = 0; number < count; ++number)  // the compiler makes the copies at the start
        if (graph.is(number, INPUT)) pass.hold(number, std::max<int64_t>(graph.copied[number], 0));
    for (int64_t number = 0; number < count; ++number) {
        if (!runs[number]) continue;
        pass.compute(number);
        const int64_t held = needs.held[number];
        if (held >= 0 && held != graph.nbytes[number]) pass.hold(count + number, held);
    }
    kept.insert(kept.end(), planes.begin(), planes.end());
    for (int64_t number = 0; graph.saves_copies && number < count; ++number)
        if (needs.inputs[number] && graph.copied[number] >= 0) kept.push_back(number);
    for (int64_t number = 0; number < count; ++number)
        if (graph.is(number, RESULT) && !graph.is(number, GRADIENT)) kept.push_back(number);
    return pass.finish(kept);
}

}  // namespace bs

// Estimates both passes for the values that `saved` has bytes of. `peaks` has room for 6 * count + 8 numbers: bytes at
// the operators of forward, and then those of backward. `numbers` has room for 2 * count: what is read of what was
// saved, and then what is computed again. `sizes` gets the lengths of the four.
BS_EXPORT void bs_lifetimes(const bs::Graph* graph, const int64_t* saved, double* peaks, int64_t* numbers,
                            int64_t* sizes) {
    bs::Needs needs;
    const std::vector<double> late = bs::backward(*graph, saved, needs), early = bs::forward(*graph, needs);
    peaks = std::copy(early.begin(), early.end(), peaks);
    std::copy(late.begin(), late.end(), peaks);
    numbers = std::copy(needs.used.begin(), needs.used.end(), numbers);
    std::copy(needs.again.begin(), needs.again.end(), numbers);
    sizes[0] = static_cast<int64_t>(early.size());
    sizes[1] = static_cast<int64_t>(late.size());
    sizes[2] = static_cast<int64_t>(needs.used.size());
    sizes[3] = static_cast<int64_t>(needs.again.size());
}
