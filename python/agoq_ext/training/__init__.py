"""`agoq train` and `agoq demo`: a LLaMA-style model trained on bytes of text by several ranks.

`config` says what a run is, `data` and `model` make its parts, `gradients` exchanges gradients between ranks,
`trainer` is the loop, `checkpoint` saves and resumes it, `launch` starts the ranks, `demo` compares two runs.
"""
