// Search runs in a Worker, which browsers do not start for pages opened as files. There, a hidden frame stands in.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inner = this.frame.contentDocument;
      inner.open();
      inner.write(`<body><script src="${address}"></scr` + "ipt></body>");
      // What the script posts goes to whoever listens here, after it has returned.
      this.frame.contentWindow.postMessage = (data) =>
        setTimeout(() => this.dispatchEvent(new MessageEvent("message", { data })));
      inner.close();
      this.loaded = new Promise((resolve) => this.frame.contentWindow.addEventListener("load", resolve));
    }

    postMessage(data) {
      this.loaded.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
