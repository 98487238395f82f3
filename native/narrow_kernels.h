// Integers in few bits. Compiled once per instruction set by foreach_isa.h.

#include "fields.h"

// `begin` is a multiple of 8, so every block starts at a whole byte.
template <class T>
inline void encode_integers(const NarrowEncodeJob& job, int64_t begin, int64_t end) {
    encode_fields(static_cast<const T*>(job.x) + begin, end - begin, job.bits, job.base,
                  job.packed + begin / 8 * job.bits);
}

template <class T>
inline void decode_integers(const NarrowDecodeJob& job, int64_t begin, int64_t end) {
    decode_fields(job.packed + begin / 8 * job.bits, end - begin, job.bits, job.base,
                  static_cast<T*>(job.out) + begin);
}

void narrow(const NarrowEncodeJob& job, int64_t begin, int64_t end) {
    switch (job.type) {
        case Integer::I64: return encode_integers<int64_t>(job, begin, end);
        case Integer::I32: return encode_integers<int32_t>(job, begin, end);
        case Integer::I16: return encode_integers<int16_t>(job, begin, end);
        case Integer::I8: return encode_integers<int8_t>(job, begin, end);
        case Integer::U8: return encode_integers<uint8_t>(job, begin, end);
        case Integer::Bool: return encode_integers<Boolean>(job, begin, end);
    }
}

void unnarrow(const NarrowDecodeJob& job, int64_t begin, int64_t end) {
    switch (job.type) {
        case Integer::I64: return decode_integers<int64_t>(job, begin, end);
        case Integer::I32: return decode_integers<int32_t>(job, begin, end);
        case Integer::I16: return decode_integers<int16_t>(job, begin, end);
        case Integer::I8: return decode_integers<int8_t>(job, begin, end);
        case Integer::U8: return decode_integers<uint8_t>(job, begin, end);
        case Integer::Bool: return decode_integers<Boolean>(job, begin, end);
    }
}
