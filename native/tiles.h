// How much of an image in channels last is turned at a time.
#pragma once

#include <cstdint>

namespace bs {

constexpr int64_t kSide = 16;       // elements of a square's side
constexpr int64_t kTile = 1 << 13;  // elements of a tile
constexpr int64_t kChannels = 64;   // channels of these at most
constexpr int64_t kTurned = 1024;   // positions that a thread takes at a time

}  // namespace bs
