// Pipelines that the GPU's compiler has refused. A plan with one of them is made anew, in the
// simplest form of its kernels.
#pragma once

#include <string>

#include "csrc/metal/launch_plan.h"

namespace mlx_paged {

// Any thread may call these.
void note_refused_pipeline(const std::string& name);
void forget_refused_pipelines();

// Whether all calls are planned in that form, as if each pipeline of another form were refused.
void use_simplest_forms(bool is_wanted);

bool needs_simplest_form(const LaunchPlans& plans);

}  // namespace mlx_paged
