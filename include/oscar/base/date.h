#pragma once

#include <string>

namespace oscar {

// Now, in UTC: "2026-01-02T03:04:05Z". The environment's SOURCE_DATE_EPOCH (seconds since 1970) replaces the clock, so that a
// file that carries its date can be made again byte for byte; Error when it is no number of seconds up to the year 9999.
std::string utc_date();

}  // namespace oscar
