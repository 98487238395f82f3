// What the one-pass kernels compute of an element. g++ compiles these bodies for CPUs (onepass_kernels.h) and nvcc for
// GPUs (kernels.cu), so what the tests prove here on a CPU is the arithmetic of both. No include guard: foreach_isa.h
// reads this once per instruction set, inside a namespace.
//
// Whoever includes it defines BS_BODY, which stands before every function, and includes elements.h, <cmath>, <cstdint>.

// Orders of a norm's arithmetic; their codes are those of layout.NormOrder. `fma` is rounded once.
enum class Order : int {
    Normalized = 0,  // fma((x - mean) * rstd, weight, bias)
    Separate = 1,    // (x - mean) * rstd * weight + bias
    Scaled = 2,      // fma(x, rstd * weight, fma(-mean, rstd * weight, bias))
    Rounded = 3,     // as Separate; (x - mean) * rstd is rounded to the result's type before it is multiplied
    Shifted = 4,     // fma(fma(x, rstd, -(rstd * mean)), weight, bias)
};

// Functions of one number; their codes are those of layout.ComputedCurve.
enum class Curve : int { None = 0, Silu = 1, Gelu = 2 };

BS_BODY uint32_t float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
BS_BODY float bits_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

BS_BODY float widened(float x) { return x; }
BS_BODY float widened(BFloat16 x) { return bits_float(uint32_t(x.bits) << 16); }
BS_BODY float widened(Half x) {
    const uint32_t rest = x.bits & 0x7fff;
    const uint32_t normal = (rest << 13) + (112u << 23) + (rest >= 0x7c00 ? 112u << 23 : 0);
    const uint32_t small = float_bits(float(int32_t(rest)) * 0x1p-24f);
    return bits_float((rest < 0x400 ? small : normal) | uint32_t(x.bits & 0x8000) << 16);
}

// To the nearest number, ties to even. What becomes of NaN depends on who rounds: `nan` are its bits; 0 for a quiet NaN
// that keeps its sign and the upper bits of its payload.
BS_BODY void narrow(float x, uint16_t, float& to) { to = x; }
BS_BODY void narrow(float x, uint16_t nan, BFloat16& to) {
    const uint32_t bits = float_bits(x);
    const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    const uint16_t odd = nan != 0 ? nan : uint16_t(bits >> 16 | 0x40);
    to.bits = is_nan ? odd : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
BS_BODY void narrow(float x, uint16_t nan, Half& to) {
    const uint32_t bits = float_bits(x), rest = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
    const uint32_t rounded = (rest + 0xfff + (rest >> 13 & 1) - (112u << 23)) >> 13;
    const uint32_t normal = rounded < 0x7c00 ? rounded : 0x7c00;
    const uint32_t small = float_bits(bits_float(rest) + 0.5f) - 0x3f000000;  // 0.5's last bit is the least subnormal
    const uint32_t number = rest < 0x38800000 ? small : normal;
    const uint16_t odd = nan != 0 ? nan : uint16_t(sign | 0x7e00 | (rest >> 13 & 0x3ff));
    to.bits = rest > 0x7f800000 ? odd : uint16_t(number | sign);
}

// A norm's element in two halves, because Rounded rounds what is between them.
BS_BODY float centred(float x, float mean, float rstd) { return (x - mean) * rstd; }
BS_BODY float shifted(float x, float shift, float rstd) { return fmaf(x, rstd, shift); }
BS_BODY float weighted(float normal, float weight, float bias, Order order) {
    const bool is_fused = order == Order::Normalized || order == Order::Shifted;
    return is_fused ? fmaf(normal, weight, bias) : normal * weight + bias;
}

// Of Scaled: one product and sum for each element, of coefficients that neighbours share.
struct Line {
    float scale, shift;
};
BS_BODY Line line_of(float mean, float rstd, float weight, float bias) {
    const float scale = rstd * weight;
    return {scale, fmaf(-mean, scale, bias)};
}
BS_BODY float on_line(float x, Line line) { return fmaf(x, line.scale, line.shift); }

// A batch norm's element in the orders of layout.Rounding. Two of them are a line, of coefficients that a channel shares.
struct Normed {
    float mean, invstd, weight, bias;
};
BS_BODY Line shifted_line(Normed of) {
    const float scale = of.invstd * of.weight;
    return {scale, of.bias - of.mean * scale};
}
BS_BODY float batch_normed(float x, Normed of, int rounding) {
    switch (rounding) {
        case 0: return on_line(x, line_of(of.mean, of.invstd, of.weight, of.bias));
        case 1: return fmaf(of.weight * (x - of.mean), of.invstd, of.bias);
        case 2: return fmaf((x - of.mean) * of.invstd, of.weight, of.bias);
        case 3: return fmaf(x - of.mean, of.invstd * of.weight, of.bias);
        default: return on_line(x, shifted_line(of));
    }
}

// Activations whose bits depend on no library. Of two zeros, and of NaN, the value stays and the bound does not.
BS_BODY float clamped(float x, float lo, float hi) {
    x = x < lo ? lo : x;
    return x > hi ? hi : x;
}
BS_BODY float leaked(float x, float slope) { return x > 0.0f ? x : x * slope; }
// By a code of layout.Activation.
BS_BODY float activated(float x, int activation, float lo, float hi) {
    return activation == 1 ? clamped(x, lo, hi) : activation == 2 ? leaked(x, lo) : x;
}

// What is known of a relu's result by a bit: zero, or no less than the smallest normal number. NaN stays.
BS_BODY float as_masked(float x, bool is_set) { return is_set ? (x < 0x1p-126f ? 0x1p-126f : x) : 0.0f; }

// exp(x) within one unit in the last place. The steps are those of SLEEF's expf_u10 (Boost license), which ATen calls on
// x86, so the bits are too; they are the same on every device.
BS_BODY float exponential(float x) {
    const float wanted = x * 1.442695040888963407359924681001892137426645954152985934135449406931f;
    const float bounded = wanted < -1000.0f ? -1000.0f : wanted < 1000.0f ? wanted : 1000.0f;  // NaN too, as an integer
    const float whole = rintf(bounded);
    const int32_t power = int32_t(whole);
    float rest = fmaf(whole, -0.693145751953125f, x);
    rest = fmaf(whole, -1.428606765330187045e-06f, rest);
    float sum = 0.000198527617612853646278381f;
    sum = fmaf(sum, rest, 0.00139304355252534151077271f);
    sum = fmaf(sum, rest, 0.00833336077630519866943359f);
    sum = fmaf(sum, rest, 0.0416664853692054748535156f);
    sum = fmaf(sum, rest, 0.166666671633720397949219f);
    sum = fmaf(sum, rest, 0.5f);
    const float near_one = fmaf(rest * rest, sum, rest) + 1.0f;
    const int32_t half = power >> 1;  // two factors, so that neither leaves the range of exponents
    const float found = near_one * bits_float(uint32_t(half + 127) << 23) * bits_float(uint32_t(power - half + 127) << 23);
    const float small = x < -104.0f ? 0.0f : found;
    return x > 100.0f ? bits_float(0x7f800000) : small;
}

// Abramowitz and Stegun 7.1.26, in the steps of ATen's vectors on x86 (Vectorized<float>::erf).
BS_BODY float error_function(float x) {
    const uint32_t sign = float_bits(x) & 0x80000000;
    const float size = bits_float(float_bits(x) ^ sign);
    const float t = 1.0f / fmaf(0.3275911f, size, 1.0f);
    float sum = fmaf(1.061405429f, t, -1.453152027f);
    sum = fmaf(sum, t, 1.421413741f);
    sum = fmaf(sum, t, -0.284496736f);
    sum = fmaf(sum, t, 0.254829592f);
    const float found = fmaf(-exponential(-(x * x)) * t, sum, 1.0f);
    return bits_float(float_bits(found) ^ sign);
}

BS_BODY float curved(float x, Curve curve) {
    if (curve == Curve::Silu) return x / (1.0f + exponential(-x));
    if (curve == Curve::Gelu) return x * 0.5f * (1.0f + error_function(x * 0.70710678118654752440f));
    return x;
}

// Dropout: what is kept is multiplied by the scale, the rest by zero, as a product with a mask of numbers does.
BS_BODY float dropped(float x, bool is_kept, float scale) { return x * (is_kept ? scale : 0.0f); }
