"""Every decision of speculative decoding, shared by the simulator and the engine.

No torch, no clock, no input or output: the simulator runs these objects under SimPy's clock with
predicted step times, the engine runs the same objects under the wall clock with real forwards.

    spec, labels, speculation  a policy as data, its name, its object
    interface           the questions that a round asks a policy
    chains, trees       policies that treat requests one by one; other ways to overlap: parallel
    adaptive, turbospec chains whose length follows the predicted goodput; slo_room: how long a
                        round may be
    batch_tree          trees that share the rows of a batch: batch_round and row_prices,
                        batch_rows, batch_drafting with first_look and batch_ahead, batch_beside;
                        budget_tree for each request
    adaserve            rows for requests that are behind their target (urgency)
    resting, repeating  rounds without an evaluation of the batch
    turns               who takes part in a round of plain decoding
    ahead               steps that ranks begin before their host has read the last one
    step_time           seconds of a step; cost, host_cost, goodput: of a round, and its tokens
    features            draft heads that read the target's features
    online_calibration, traffic, lately  what is learned while requests run
    protocol            a round as two state machines: draft_side (drafted: one
                        request's), target_side, messages (light)
    tree, rerun_tree    a request's draft tree, also with nodes that run again; walk: verification
    batching, on_time   which requests share a step, and who joins them so that targets are kept
                        (answers, pace)
    routing             which replica serves a request
    kv_memory           prompt blocks that outlive their request
    options, stop_text  what a request asks for itself
"""
