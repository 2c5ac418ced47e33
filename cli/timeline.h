// Pictures of a profile: live bytes over one training step, stacked by module.
#pragma once
#include <string>
#include <vector>

#include "rewriter/measure/profile.h"

namespace tsmem::cli {

// Of a module path, the module around it; "" for the outermost.
std::string parent(const std::string& path);

struct TitledProfile {
  std::string title;
  const Profile* profile;
};

// One panel a profile, all on the same scales: MiB over milliseconds of the recorded step, backward shaded, the peak
// marked.
std::string timeline_svg(const std::vector<TitledProfile>& profiles);

// The same as one page without links: a cursor over all of them, zoom, and a table of the modules.
std::string timeline_html(const std::vector<TitledProfile>& profiles);

// For chrome://tracing and ui.perfetto.dev: a process a profile, with its ops and a counter of live bytes by module.
std::string chrome_trace(const std::vector<TitledProfile>& profiles);

}  // namespace tsmem::cli
