"""What torch.compile(backend="tsmem") calls through the entry point group `torch_dynamo_backends`.

Nothing is imported up here: Dynamo reads entry points when it lists backends too.
"""


def backend(gm, examples, **kwargs):
    from tsmem._dynamo import compile_graph

    return compile_graph(gm, examples, **kwargs)
