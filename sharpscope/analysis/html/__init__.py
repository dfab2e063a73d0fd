"""The page of `analyze`: templates, assets, and the token view."""
