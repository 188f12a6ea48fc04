"""Text in and out of token ids: tokenizer, chat template, incremental decoding, stop strings.

Imports no torch and no transformers. Nothing is imported here, so that the renderer's child process
(`coordinator.text.render_worker`) starts fast.
"""
