// How much of an image in channels last is turned at a time.
#pragma once

#include <cstdint>

namespace bs {

constexpr int64_t kTile = 64;      // positions
constexpr int64_t kChannels = 32;  // channels of these

}  // namespace bs
