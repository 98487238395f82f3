// Integers to and from fields of `bits` bits, for runs that start at a whole byte. Included inside a namespace by the
// kernels that need it. There are no intrinsics: these are loops that compilers turn into vector code for whichever
// instruction set the namespace is compiled for.

constexpr int64_t kRun = 1024;  // elements that go through a buffer in the first-level cache at a time

template <class T>
inline uint64_t widen(T x) {
    return uint64_t(int64_t(x));
}
inline uint64_t widen(Boolean x) { return x.byte != 0; }

template <class T>
struct Narrowed {
    static T from(uint64_t value) { return T(value); }
};
template <>
struct Narrowed<Boolean> {
    static Boolean from(uint64_t value) { return Boolean{uint8_t(value != 0)}; }
};

template <class U>
inline U load_at(const uint8_t* bytes, int64_t i) {
    U value;
    std::memcpy(&value, bytes + i * int64_t(sizeof(U)), sizeof(U));
    return value;
}
template <class U>
inline void store_at(uint8_t* bytes, int64_t i, U value) {
    std::memcpy(bytes + i * int64_t(sizeof(U)), &value, sizeof(U));
}

// 8, 16 or 32 bits: a field is an integer.
template <class Field, class T>
inline void encode_whole(const T* x, int64_t n, uint64_t base, uint8_t* packed) {
    for (int64_t i = 0; i < n; ++i) store_at<Field>(packed, i, Field(widen(x[i]) - base));
}
template <class Field, class T>
inline void decode_whole(const uint8_t* packed, int64_t n, uint64_t base, T* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = Narrowed<T>::from(load_at<Field>(packed, i) + base);
}

// 1, 2 or 4 bits: 8 / bits bytes, a field in each, side by side in a Group, fold to one byte.
template <int bits>
struct GroupOf;
template <>
struct GroupOf<1> {
    using Type = uint64_t;
};
template <>
struct GroupOf<2> {
    using Type = uint32_t;
};
template <>
struct GroupOf<4> {
    using Type = uint16_t;
};

template <int bits, class T>
inline void encode_part(const T* x, int64_t n, uint64_t base, uint8_t* packed) {
    using Group = typename GroupOf<bits>::Type;
    constexpr int64_t fields = 8 / bits;
    uint8_t bytes[kRun];
    for (int64_t done = 0; done < n; done += kRun) {
        const int64_t count = std::min(n - done, kRun), groups = (count + fields - 1) / fields;
        for (int64_t i = 0; i < count; ++i) bytes[i] = uint8_t((widen(x[done + i]) - base) & ((1 << bits) - 1));
        for (int64_t i = count; i < groups * fields; ++i) bytes[i] = 0;
        uint8_t* to = packed + done / fields;
        for (int64_t i = 0; i < groups; ++i) {
            const Group group = load_at<Group>(bytes, i);
            Group folded = 0;
            for (int k = 0; k < fields; ++k) folded |= Group(group >> (k * (8 - bits)));
            to[i] = uint8_t(folded);
        }
    }
}
template <int bits, class T>
inline void decode_part(const uint8_t* packed, int64_t n, uint64_t base, T* out) {
    using Group = typename GroupOf<bits>::Type;
    constexpr int64_t fields = 8 / bits;
    uint8_t bytes[kRun];
    for (int64_t done = 0; done < n; done += kRun) {
        const int64_t count = std::min(n - done, kRun), groups = (count + fields - 1) / fields;
        const uint8_t* from = packed + done / fields;
        for (int64_t i = 0; i < groups; ++i) {
            Group group = 0;
            for (int k = 0; k < fields; ++k)
                group |= Group(Group(from[i]) << (k * (8 - bits))) & Group(Group((1 << bits) - 1) << (8 * k));
            store_at<Group>(bytes, i, group);
        }
        for (int64_t i = 0; i < count; ++i) out[done + i] = Narrowed<T>::from(bytes[i] + base);
    }
}

// Any width up to 32: a stream of bits, 64 of which are at hand.
template <class T>
inline void encode_stream(const T* x, int64_t n, int bits, uint64_t base, uint8_t* packed) {
    const uint64_t field_mask = (uint64_t(1) << bits) - 1;
    uint64_t pending = 0;
    int filled = 0;  // bits in `pending`: fewer than 32 between the elements
    for (int64_t i = 0; i < n; ++i) {
        pending |= ((widen(x[i]) - base) & field_mask) << filled;
        filled += bits;
        if (filled >= 32) {
            const uint32_t full = uint32_t(pending);
            std::memcpy(packed, &full, sizeof full);
            packed += sizeof full;
            pending >>= 32;
            filled -= 32;
        }
    }
    std::memcpy(packed, &pending, size_t(filled + 7) / 8);
}
template <class T>
inline void decode_stream(const uint8_t* packed, int64_t n, int bits, uint64_t base, T* out) {
    const uint64_t field_mask = (uint64_t(1) << bits) - 1;
    const int64_t nbytes = (n * bits + 7) / 8;
    for (int64_t i = 0; i < n; ++i) {
        const int64_t bit = i * bits, byte = bit / 8;
        uint64_t window = 0;  // at most 7 + 32 bits of it matter
        if (nbytes - byte >= 8) std::memcpy(&window, packed + byte, 8);
        else std::memcpy(&window, packed + byte, size_t(nbytes - byte));
        out[i] = Narrowed<T>::from((window >> (bit % 8) & field_mask) + base);
    }
}

template <class T>
inline void encode_fields(const T* x, int64_t n, int bits, uint64_t base, uint8_t* packed) {
    switch (bits) {
        case 1: return encode_part<1>(x, n, base, packed);
        case 2: return encode_part<2>(x, n, base, packed);
        case 4: return encode_part<4>(x, n, base, packed);
        case 8: return encode_whole<uint8_t>(x, n, base, packed);
        case 16: return encode_whole<uint16_t>(x, n, base, packed);
        case 32: return encode_whole<uint32_t>(x, n, base, packed);
        default: return encode_stream(x, n, bits, base, packed);
    }
}

template <class T>
inline void decode_fields(const uint8_t* packed, int64_t n, int bits, uint64_t base, T* out) {
    switch (bits) {
        case 1: return decode_part<1>(packed, n, base, out);
        case 2: return decode_part<2>(packed, n, base, out);
        case 4: return decode_part<4>(packed, n, base, out);
        case 8: return decode_whole<uint8_t>(packed, n, base, out);
        case 16: return decode_whole<uint16_t>(packed, n, base, out);
        case 32: return decode_whole<uint32_t>(packed, n, base, out);
        default: return decode_stream(packed, n, bits, base, out);
    }
}
