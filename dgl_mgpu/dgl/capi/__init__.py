"""The seam with DGL's C++: its functions, bound to names ``_CAPI_…`` in DGL's modules.

Each name is bound to a `dispatch.Dispatcher`, which hands calls with graphs or arrays on a GPU
to this package, and all others to DGL's C++.  `table` lists where every function runs,
`roundtrip` runs on the CPU what has no implementation here, `record` counts and logs.
"""
