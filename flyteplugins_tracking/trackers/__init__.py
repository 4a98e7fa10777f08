"""The tracking services, and what a tracker of a third party needs.

In the room: what a tracker is (`base`), a base for clients that send rows (`client`), files that are sent later
(`journal`), how the ranks that write to one run find each other (`peers`), the doctor's diagnostics, and a
folder for each service.
May enter: what speaks to a service. Must not: Flyte, or what a service has no part in. A folder of one service does not
import another's, and a vendor's package is imported inside functions only.
It may import `errors`, `_util`, `_job` and `_config`.
"""
