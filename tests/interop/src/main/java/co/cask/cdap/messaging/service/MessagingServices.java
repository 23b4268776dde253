package co.cask.cdap.messaging.service;

import co.cask.cdap.common.conf.CConfiguration;
import co.cask.cdap.common.metrics.NoOpMetricsCollectionService;
import co.cask.cdap.common.utils.TimeProvider;
import co.cask.cdap.messaging.MessagingService;
import co.cask.cdap.messaging.store.TableFactory;

/** Makes CDAP's service with a clock of ours; only its own package may. */
public final class MessagingServices {
  private MessagingServices() {
  }

  /** The service is not started: all that starting does is to create the system topics, which nobody asked for. */
  public static MessagingService create(CConfiguration conf, TableFactory tables, TimeProvider writeClock) {
    return new CoreMessagingService(conf, tables, writeClock, new NoOpMetricsCollectionService());
  }
}
