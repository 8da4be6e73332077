#include "base/dynlib.h"

#include <dlfcn.h>
#include <link.h>

#include "base/error.h"

namespace mscomm {

Dynlib::Dynlib(std::string name, const std::vector<Candidate>& candidates, Names names) : name_(std::move(name)) {
  const int seen_by = names == Names::own ? RTLD_LOCAL : RTLD_GLOBAL;
  std::string tried;
  for (const Candidate& candidate : candidates) {
    const bool loaded = candidate.kind == Candidate::Kind::loaded;
    handle_ = dlopen(candidate.path.c_str(), RTLD_NOW | seen_by | (loaded ? RTLD_NOLOAD : 0));
    if (handle_) {
      const link_map* map = nullptr;
      path_ = dlinfo(handle_, RTLD_DI_LINKMAP, &map) == 0 && map && *map->l_name ? map->l_name : candidate.path;
      origin_ = candidate.origin;
      return;
    }
    const char* why = loaded ? nullptr : dlerror();
    if (!tried.empty()) tried += "; ";
    // The text of dlerror() already contains the path.
    tried += candidate.origin + ": " + (loaded ? "it is not in this process" : why ? why : candidate.path);
    if (candidate.kind == Candidate::Kind::must) break;
  }
  throw Error("BackendUnavailable", "cannot open " + name_ + ". Tried: " + (tried.empty() ? "nothing" : tried));
}

Dynlib::Symbol Dynlib::find(const char* name) const { return {dlsym(handle_, name)}; }

Dynlib::Symbol Dynlib::need(const char* name) const {
  const Symbol found = find(name);
  if (!found.address)
    throw Error("BackendUnavailable", path_ + " (" + origin_ + ") has no function " + name + ": it is too old, or not " + name_);
  return found;
}

}  // namespace mscomm
