// What MindSpore's front end must know of the operator. CustomOpBuilder can generate this from YAML, but needs PyYAML for
// it at every load; written out it needs nothing. The primitive's name must be the one here: Custom_add_lora.
#include "ir/signature.h"
#include "primitive/auto_generate/gen_ops_def.h"

namespace mindspore::ops {

extern OpFuncImpl &gCustom_add_loraFuncImpl;

namespace {

OpInputArg tensor(const char *name, bool optional = false) { return {name, DT_TENSOR, 0, "", {}, optional}; }
OpInputArg number(const char *name, OP_DTYPE type) { return {name, type, 0, "", {}, false}; }

}  // namespace

OpDef gCustom_add_lora = {
    "Custom_add_lora",
    {tensor("y"), tensor("x"), tensor("weight_b"), tensor("indices"), number("layer_idx", DT_INT),
     number("scale", DT_FLOAT), number("y_offset", DT_INT), number("y_slice_size", DT_INT),
     tensor("weight_a", /*optional=*/true)},
    {{"out", DT_TENSOR, /*inplace_input_index_=*/-1}},
    /*signatures_=*/{},
    {{"y", 0},
     {"x", 1},
     {"weight_b", 2},
     {"indices", 3},
     {"layer_idx", 4},
     {"scale", 5},
     {"y_offset", 6},
     {"y_slice_size", 7},
     {"weight_a", 8}},
    gCustom_add_loraFuncImpl,
    /*enable_dispatch_=*/false,
    /*is_view_=*/false,
    /*is_graph_view_=*/false,
};
REGISTER_PRIMITIVE_OP_DEF(Custom_add_lora, &gCustom_add_lora);

}  // namespace mindspore::ops
