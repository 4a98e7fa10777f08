// The site's search from the disk. A browser refuses workers for file:// pages, so the worker's script runs in a hidden
// frame. Without this file the builder loads such a script from unpkg.com, which a machine without a network cannot.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inside = this.frame.contentWindow
      inside.postMessage = data => setTimeout(() => this.answer(data)) // later, as a worker's message comes
      const script = inside.document.createElement("script")
      script.src = new URL(url, location.href)
      script.onload = () => this.start()
      inside.document.body.append(script)
    }

    answer(data) {
      const event = new MessageEvent("message", { data })
      this.dispatchEvent(event)
      this.onmessage?.(event)
    }

    start() {
      const waiting = this.waiting
      this.waiting = null
      waiting.forEach(data => this.postMessage(data))
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data)
      else this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
