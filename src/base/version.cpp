#include "oscar/version.h"
namespace oscar {
const char* version() { return OSCAR_VERSION; }
}  // namespace oscar
