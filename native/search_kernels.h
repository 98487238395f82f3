// The loops over positions of a search for plans. Compiled once per instruction set by foreach_isa.h. All sums are in the
// order of positions, so each instruction set has the same bits.

// Adds `nbytes` to the positions [from, to).
void add_bytes(int64_t* live, int64_t from, int64_t to, int64_t nbytes) {
    for (int64_t at = from; at < to; ++at) live[at] += nbytes;
}

// The most of at least one number.
int64_t most_of(const int64_t* live, int64_t count) {
    int64_t found = live[0];
    for (int64_t at = 1; at < count; ++at) found = live[at] > found ? live[at] : found;
    return found;
}

// e to the power of (live - top) / tau, which is at most 1, with the operations of exponential() in moves.py.
void weigh(const int64_t* live, int64_t count, double top, double tau, double* weights) {
    for (int64_t at = 0; at < count; ++at) {
        const double x = (static_cast<double>(live[at]) - top) / tau * 1.4426950408889634;
        const double y = x > -1000.0 ? x : -1000.0;
        const int64_t truncated = static_cast<int64_t>(y);
        const int64_t whole = truncated - (y < static_cast<double>(truncated) ? 1 : 0);
        const double z = y - static_cast<double>(whole);
        double p = 0.0018775767;
        p = p * z + 0.0089893397;
        p = p * z + 0.0558282752;
        p = p * z + 0.2401535968;
        p = p * z + 0.6931528731;
        p = p * z + 0.9999999999;
        const uint64_t bits = static_cast<uint64_t>(whole + 1023) << 52;
        double scale;
        std::memcpy(&scale, &bits, sizeof scale);
        weights[at] = p * scale;
    }
}
